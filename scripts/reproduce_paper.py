"""Rerun the source paper's tables: convert and evaluate each row's model, our numbers beside the paper's.

    python scripts/reproduce_paper.py --out DIR [--row NAME]... [--kernel NAME]... [--data DIR] [--models DIR]
    python scripts/reproduce_paper.py --list
    python scripts/reproduce_paper.py --out DIR --offline-proof [--row NAME]...

Models and data come from the Hub; data is written under ``--data`` once and read from there afterwards. A folder
``--data/NAME`` that is there already is used as it is (``coco``, ``coco-captions``, ``sugarcrepe``, ``cifar10``, …, and
``coco-train`` for calibration), and so is a checkpoint ``--models/OWNER/NAME``. The recipe is ``configs/paper.yaml``;
kernels other than ``latte`` and ``qt_vit`` are converted as the tool does by default, and have no ablation of TTE and
JPN. ``DIR/reproduction.json`` and ``DIR/reproduction.md`` keep what other runs measured; a row without a result stays
empty.

``--offline-proof`` runs the same code without a connection on the project's own small models and rendered data, to
show that every row runs. Its numbers say nothing about the paper.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reproduction.hub_data import calibration, place_of
from reproduction.rows import ROWS, Row

from latte_convert import LatteError, Recipe, convert
from latte_convert.errors import nearest
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.kernels.base import Extras

PAPER = Path(__file__).resolve().parents[1] / "configs" / "paper.yaml"
PAPERS_KERNELS = ("latte", "qt_vit")
PROOF_SAMPLES = 24
PROOF_CALIBRATION = 4


@dataclass
class Bench:
    """Where things are, and how much of them is used; artifacts are made once for all rows that share one."""

    data: Path
    models: Path | None
    scratch: Path
    samples: int | None = None
    calib_samples: int | None = None
    batch_size: int = 16
    device: str = "auto"
    allow_pickle: bool = False
    made: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def model(self, row: Row) -> str:
        """A local replacement of a row's checkpoint, or its Hub id."""
        local = self.models / row.model if self.models else None
        return str(local) if local is not None and local.is_dir() else row.model

    def artifact(self, row: Row, kernel: str) -> tuple[Path, str]:
        """The hybrid of a row, and how many of its sites are converted."""
        recipe = recipe_of(row, kernel, self.calib_samples)
        key = json.dumps([row.model, row.calib, recipe.model_dump(mode="json")])
        if key not in self.made:
            result = convert(
                self.model(row), calibration(row.calib, self.data), recipe=recipe, device=self.device,
                allow_pickle=self.allow_pickle,
            )  # fmt: skip
            sites = f"{len(result.plan.converted)} of {sum(site.eligible for site in result.report.sites)}"
            self.made[key] = (result.save(self.scratch / str(len(self.made))), sites)
        return self.made[key]

    def run(self, row: Row, kernel: str) -> dict[str, Any]:
        """Convert and evaluate: what is kept of one run."""
        places = [place_of(name, self.data) for name in row.data]
        artifact, sites = self.artifact(row, kernel)
        templates = None
        if row.templates:
            templates = self.scratch / f"{row.name}.txt"
            templates.write_text("\n".join(row.templates) + "\n", encoding="utf-8")
        report = evaluate(
            artifact, row.task, places, samples=self.samples, batch_size=self.batch_size, templates=templates,
            device=self.device,
        )  # fmt: skip
        metrics = {name: report.metrics[name].model_dump(mode="json") for name in row.figures}
        replaced = self.model(row) != row.model
        return {"replaced": replaced, "converted": sites, "samples": report.samples, "metrics": metrics}


def recipe_of(row: Row, kernel: str, samples: int | None = None) -> Recipe:
    """The paper's recipe with a row's settings; the tool's own for a kernel that is not in the paper."""
    values = Recipe.from_yaml(PAPER).model_dump(exclude_unset=True)
    options = values.pop("options") | row.settings.get("options", {})
    if kernel not in PAPERS_KERNELS:
        values, options = {key: values[key] for key in ("ratio", "samples")}, {}
    elif kernel != "latte":
        options = {name: value for name, value in options.items() if name in Extras.__annotations__}
    values |= row.settings | {"kernel": kernel, "options": options} | ({"samples": samples} if samples else {})
    return Recipe.build(values, origin=row.name)


def runs(names: Sequence[str], kernels: Sequence[str]) -> Iterator[tuple[Row, str]]:
    """Rows and kernels that go together."""
    for row in ROWS:
        for kernel in kernels:
            if row.name in names and (kernel == "latte" or "options" not in row.settings):
                yield row, kernel


def document(results: dict[str, dict[str, Any]], proof: bool) -> dict[str, Any]:
    """All rows with the paper's figures (percent) and ours (as measured); null where there is none."""
    rows = [{**asdict(row), "ours": results.get(row.name, {})} for row in ROWS]
    return {"schema_version": 1, "offline_proof": proof, "rows": rows}


def markdown(results: dict[str, dict[str, Any]], proof: bool) -> str:
    """The rows as Markdown, a table for each of the paper's; percent."""
    kernels = sorted({kernel for result in results.values() for kernel in result}, key=lambda k: (k != "latte", k))
    lines = ["# The source paper's tables, rerun", ""]
    if proof:
        lines += ["**Offline proof: small models and rendered data. These numbers say nothing about the paper.**", ""]
    head = ["row", "model", "metric", "paper: original", "QT-ViT", "LATTE", "ours: original"]
    head += [column for kernel in kernels for column in (kernel, "retained (95 % interval)")]
    for table in dict.fromkeys(row.table for row in ROWS):
        lines += [f"## {table}", "", _line(head), _line(["---"] * len(head))]
        own = [row for row in ROWS if row.table == table]
        for row in own:
            lines += [_line(_cells(row, metric, results.get(row.name, {}), kernels)) for metric in row.figures]
        notes = {row.note: row.name for row in reversed(own) if row.note}
        lines += ["", *(f"* {name}: {note}" for note, name in reversed(notes.items())), ""]
    return "\n".join(lines)


def _cells(row: Row, metric: str, ours: dict[str, Any], kernels: Sequence[str]) -> list[str]:
    paper = row.figures[metric]
    found = {kernel: run["metrics"][metric] for kernel, run in ours.items()}
    originals = [value["original"] for value in found.values()]
    model = f"{row.model} (replaced)" if any(run["replaced"] for run in ours.values()) else row.model
    cells = [row.name, model, metric, *(_number(n) for n in (paper.original, paper.qt_vit, paper.latte))]
    cells.append(_number(100 * originals[0]) if originals else "")
    for kernel in kernels:
        value = found.get(kernel)
        cells += ["", ""] if value is None else [_number(100 * value["hybrid"]), _kept(value)]
    return cells


def _kept(value: dict[str, Any]) -> str:
    if value["retention"] is None:
        return str(value["reason"])
    kept = f"{100 * value['retention']:.1f}"
    return kept + (
        f" ({100 * value['interval'][0]:.1f} to {100 * value['interval'][1]:.1f})" if value["interval"] else ""
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def measure(bench: Bench, names: Sequence[str], kernels: Sequence[str], out: Path, proof: bool) -> int:
    """Run rows one after another and write after each; a row that fails is reported and stays as it was.

    Returns:
        How many failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    path, failed = out / "reproduction.json", 0
    results = _earlier(path, proof)
    for row, kernel in runs(names, kernels):
        try:
            results.setdefault(row.name, {})[kernel] = bench.run(row, kernel)
        except (LatteError, OSError) as error:
            print(f"{row.name} ({kernel}): {error}", file=sys.stderr)
            failed += 1
            continue
        path.write_text(json.dumps(document(results, proof), indent=2) + "\n", encoding="utf-8")
        (out / "reproduction.md").write_text(markdown(results, proof), encoding="utf-8")
        print(f"{row.name} ({kernel}): done", file=sys.stderr)
    return failed


def _earlier(path: Path, proof: bool) -> dict[str, dict[str, Any]]:
    """Results of earlier runs, by row and kernel.

    Raises:
        SystemExit: They are a proof and these are not, or the other way round.
    """
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["offline_proof"] != proof:
        raise SystemExit(f"{path} holds {'no ' * proof}results of an offline proof: give another --out.")
    return {row["name"]: row["ours"] for row in found["rows"]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reproduction"), help="folder for the .json and the .md")
    parser.add_argument("--row", action="append", default=[], help="a row to run; again for more [all]")
    parser.add_argument("--kernel", action="append", default=[], help="a kernel; again for more [latte]")
    parser.add_argument("--data", type=Path, help="folder of the datasets [OUT/data]")
    parser.add_argument("--models", type=Path, help="folder of checkpoints that take the place of the Hub's")
    parser.add_argument("--samples", type=int, help="evaluate on this many samples [all]")
    parser.add_argument("--calib-samples", type=int, help="calibrate on this many [those of configs/paper.yaml]")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--allow-pickle", action="store_true", help="accept checkpoints without safetensors")
    parser.add_argument("--offline-proof", action="store_true", help="the same on small models and rendered data")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    arguments = parser.parse_args(argv)
    known = [row.name for row in ROWS]
    for name in arguments.row:
        if name not in known:
            parser.error(f"there is no row '{name}' ({nearest(name, known, limit=len(known))})")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code, 1 where a row failed."""
    arguments = parse(argv)
    if arguments.list:
        print("\n".join(f"{row.name:18} {row.task:15} {row.model}" for row in ROWS))
        return 0
    names = arguments.row or [row.name for row in ROWS]
    kernels = arguments.kernel or ["latte"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        data, models = arguments.data or arguments.out / "data", arguments.models
        calib_samples = arguments.calib_samples
        if arguments.offline_proof:
            from reproduction.proof import prepare

            data, models = prepare(scratch / "proof", PROOF_SAMPLES)
            calib_samples = calib_samples or PROOF_CALIBRATION
        bench = Bench(
            data, models, scratch, arguments.samples, calib_samples, arguments.batch_size, arguments.device,
            arguments.allow_pickle,
        )  # fmt: skip
        failed = measure(bench, names, kernels, arguments.out, arguments.offline_proof)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
