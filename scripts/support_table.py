"""The table of supported architectures, made from the models that the adapter tests build.

What a row says is what ``find_sites`` finds in the small models of that row, so it is what the tests hold the package
to. Adding an architecture is adding a row to a table of the tests, and running this with ``--write docs/support.md``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.plain import plain_adapter
from latte_convert.attention import AttentionSite
from latte_convert.data.feed import Inputs

TESTS = Path(__file__).resolve().parents[1] / "tests" / "adapters"
# Modules with a dictionary BY_NAME or MODELS and a function that builds the model of a name; those of no library have
# their sites from a run on the inputs in their row.
TABLES = ("tiny_models", "vision_language_models", "timm_models", "open_clip_models", "plain_models")
BEGIN, END = "<!-- support table -->", "<!-- /support table -->"
HEADER = ("Architecture", "Library", "Classes", "Converted", "Kept exact, and why")


@dataclass
class Row:
    """Architectures with the same kinds of attention.

    Attributes:
        library: Where the classes are from.
        converted: Kinds of attention that can be converted.
        kept: Kinds that are kept exact, with the reason.
        architectures: The library's names, or the test table's where the library has none.
        classes: Names of the classes.
    """

    library: str
    converted: str
    kept: str
    architectures: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)


def models() -> Iterator[tuple[str, Host]]:
    """Name and model of every row of every table of the adapter tests, and one of plain PyTorch."""
    sys.path.insert(0, str(TESTS))
    try:
        tables = [importlib.import_module(name) for name in TABLES]
    finally:
        sys.path.remove(str(TESTS))
    for table in tables:
        for name in getattr(table, "SHOWN", None) or getattr(table, "BY_NAME", None) or table.MODELS:
            yield name, host_of(table, name)
    yield "any with `torch.nn.MultiheadAttention`", Host.of(nn.Transformer(8, 2, 1, 1, 8, batch_first=True))


def host_of(table: Any, name: str) -> Host:
    """A model of a table with its adapter."""
    model = table.build(name)
    if not hasattr(table, "KEPT"):
        return Host.of(model)
    inputs = Inputs((table.MODELS | table.KEPT)[name].inputs())
    return Host.of(model, lambda apart: plain_adapter(model, [inputs], apart))


def rows(found: Iterable[tuple[str, Host]]) -> list[Row]:
    """Rows in the order of the models; variants of one architecture that come out the same share a row."""
    merged: dict[tuple[str, ...], Row] = {}
    for name, host in found:
        model, sites = host.model, host.sites()
        library, kind = host.adapter.name, type(model).__name__
        if (home := type(model).__module__.partition(".")[0]) in ("diffusers", "torchvision", "x_transformers"):
            library = home.replace("_", "-")
        architecture = getattr(getattr(model, "config", None), "model_type", None)
        row = Row(library, _kinds(site for site in sites if site.eligible) or "none", _kept(sites) or "none")
        row = merged.setdefault((library, architecture or kind, row.converted, row.kept), row)
        for values, value in ((row.architectures, architecture or name), (row.classes, kind)):
            if value not in values:
                values.append(value)
    return list(merged.values())


def _kept(sites: list[AttentionSite]) -> str:
    reasons = dict.fromkeys(site.reason for site in sites if site.reason)
    return "; ".join(f"{_kinds(site for site in sites if site.reason == reason)} - {reason}" for reason in reasons)


def _kinds(sites: Iterable[AttentionSite]) -> str:
    """Such as ``encoder self (bias), decoder self (causal), decoder cross``."""
    return ", ".join(dict.fromkeys(f"{site.tower} {site.kind}{_notes(site)}" for site in sites))


def _notes(site: AttentionSite) -> str:
    notes = ["causal"] * site.causal + ["bias"] * site.biased
    return f" ({', '.join(notes)})" if notes else ""


def render(table: list[Row]) -> str:
    """The table in Markdown."""
    lines: list[tuple[str, ...]] = [HEADER, ("---",) * len(HEADER)]
    for row in table:
        classes = ", ".join(f"`{name}`" for name in row.classes)
        lines.append((", ".join(row.architectures), row.library, classes, row.converted, row.kept))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(document: str, table: str) -> str:
    """A document with the block between the markers replaced.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no block between {BEGIN} and {END}: put both markers where the table belongs")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write it into a document, or check the one there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--write", type=Path, metavar="FILE", help="replace the table between the markers")
    target.add_argument("--check", type=Path, metavar="FILE", help="exit 1 where the table is out of date")
    options: Any = parser.parse_args(arguments)
    table = render(rows(models()))
    path: Path | None = options.write or options.check
    if path is None:
        print(table)
        return 0
    try:
        document = path.read_text(encoding="utf-8")
        current = replaced(document, table)
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if options.write:
        path.write_text(current, encoding="utf-8")
    elif current != document:
        print(f"{path}: its support table is out of date; run {Path(__file__).name} --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
