"""What makes Whisper's encoder (30 s) and MiniLM (256 tokens) faster, end to end, and what is left of their tasks.

Rows: the original as it is, in bfloat16 and with 8-bit weights; kernels on all sites, unfitted where they need no fit;
our merging, alone and with the kernel blocks; plans that the tool finds for a speed. Nothing is fitted to the samples
that are compared on. Every way is timed in turns with the others on one sample; speed-ups are medians over the rounds,
with the least and the largest. The word error rate is against what the original hears, by the exact decoder.

    python scripts/compare_encoders.py --models ~/.cache/latte_convert/models --data DATA \
        --json scripts/results/encoders.json --markdown scripts/results/encoders.md
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare_speed import int8
from comparison.cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import Merge, merges_of
from latte_convert.bench.timing import Timed, measure
from latte_convert.conversion import analyse
from latte_convert.data.feed import Batch, Inputs, run
from latte_convert.environment import library_versions
from latte_convert.errors import GateError
from latte_convert.kernels.registry import get_kernel
from latte_convert.progress import Stopwatch
from latte_convert.recipe import Recipe
from latte_convert.selection.choice import choose_plan
from latte_convert.selection.merging import schedule
from latte_convert.task import open_task

NAMES = ("whisper", "minilm")
KERNELS = ("monarch", "near_far", "blocks")
LEFT = (0.8, 0.65, 0.5, 0.4)
"""Tokens that the last block works on, where we merge."""
TARGETS = (1.25, 1.5)
ROUNDS = 11
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way of running a model."""

    name: str
    model: nn.Module
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def merges(self) -> bool:
        """Whether tokens are merged."""
        return any(isinstance(change, Merge) for change in self.changes.values())

    def converted(self) -> Any:
        """The model for a time as this way runs it."""
        return Host.of(self.model).convert(self.changes) if self.changes else nullcontext()

    def run(self, batch: Batch) -> Any:
        """What it makes of one sample, in float32."""
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        low = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        output = run(self.model, Inputs(low))
        output.last_hidden_state = output.last_hidden_state.float()
        return output


def ways_of(case: Case) -> Iterator[Way]:
    """All rows of a model."""
    host = Host.of(case.model)
    sites = [site for site in host.sites() if site.eligible]
    blocks = list(dict.fromkeys(host.block(site.name) for site in sites))

    def kernels(name: str, some: Sequence[Any] = sites) -> dict[str, Any]:
        return {site.name: get_kernel(name)(site.heads, site.head_dim) for site in some}

    yield Way("original", case.model)
    yield Way("original, bfloat16", copy.deepcopy(case.model).bfloat16())
    yield Way("original, 8-bit weights", int8(case.model))
    for name in KERNELS:
        yield Way(f"{name}, all sites", case.model, kernels(name))
    for left in LEFT:
        yield Way(f"merge to {left:.0%}", case.model, dict(merges_of(schedule(blocks, left))))
    first = kernels("blocks", sites[: len(sites) // 2])
    yield Way(
        f"blocks on the first {len(first)}, merge to 50%", case.model, {**first, **merges_of(schedule(blocks, 0.5))}
    )
    for target in TARGETS:
        name = f"latte, --target-speedup {target:g}"
        recipe = Recipe(samples=len(case.fitting), holdout=1 / len(case.fitting), target_speedup=target)
        task = open_task(case.model, case.fitting, recipe)
        try:
            plan = choose_plan(task, *analyse(task, Stopwatch()))
        except GateError as error:
            print(name, error, flush=True)
            continue
        left = min(plan.plan.merges.values(), default=1.0)
        yield Way(f"{name} ({len(plan.kernels)} kernels, merge to {left:.0%})", case.model, dict(plan.changes))


def compare(case: Case) -> list[dict[str, Any]]:
    """All rows of one model."""
    rows, running = [], {}
    for way in ways_of(case):
        row: dict[str, Any] = {"model": case.name, "about": case.about, "metric": case.metric, "way": way.name}
        try:
            with way.converted():
                found = [way.run(batch) for batch in case.holdout]
                row["cosine"] = statistics.fmean(map(_cosine, case.originals, found))
                if case.name == "whisper" or (way.model is case.model and not way.merges):
                    row["task"] = case.task(found)  # MiniLM's runs the case's own model on padded texts, never merged
        except Exception as error:  # a row that says why it is empty is a result
            row["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        else:
            running[way.name] = Timed(partial(way.run, case.holdout[0]), way.converted)
        rows.append(row)
        print(row, flush=True)
    times: dict[str, list[float]] = {name: [] for name in running}
    for number in range(ROUNDS):
        for name, timed in list(running.items())[:: -1 if number % 2 else 1]:
            times[name].append(measure(timed, CPU))
    for row in rows:
        if own := times.get(row["way"]):
            ratios = sorted(a / b for a, b in zip(times["original"], own, strict=True))
            row["seconds"] = statistics.median(own)
            row["speedup"] = [statistics.median(ratios), ratios[0], ratios[-1]]
    return rows


def _cosine(exact: Any, found: Any) -> float:
    pair: list[Tensor] = [output.last_hidden_state for output in (exact, found)]
    return float(F.cosine_similarity(*pair, dim=-1).mean())


def render(report: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = ["# What makes encoders of speech and text faster, end to end", ""]
    lines += [
        f"Speed-up over the original (median, least and largest of {ROUNDS} rounds, one sample), {report['threads']} "
        f"threads, float32 unless said; made by `scripts/compare_encoders.py`. {report['note']}".rstrip(),
    ]
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["model"] == model]
        head = ["", f"## {rows[0]['about']}", "", f"| | speed-up | cosine | {rows[0]['metric']} |", "|---|---|---|---|"]
        lines += head + [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    if "speedup" not in row:
        return f"| {row['way']} | {row.get('reason', 'not run')} | | |"
    middle, low, high = row["speedup"]
    task = f"{row['task']:.3f}" if "task" in row else "not run"
    return f"| {row['way']} | {middle:.2f}x ({low:.2f}-{high:.2f}) | {row['cosine']:.4f} | {task} |"


def main() -> None:
    """Measure each model and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--note", default="", help="what a reader of the table must know of this run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "threads": torch.get_num_threads(), "versions": library_versions(), "note": arguments.note, "rows": []
    }  # fmt: skip
    for name in arguments.only:
        report["rows"] += compare(CASES[name](arguments.models, arguments.data, False))
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if arguments.markdown:
            arguments.markdown.write_text(render(report), encoding="utf-8")


if __name__ == "__main__":
    main()
