"""Every kernel on every model: how faithful, how good at the task, how many FLOPs, how fast, how much memory.

    python scripts/compare_kernels.py --models DIR --data DIR --json FILE [--case NAME]... [--kernel LABEL]...
    python scripts/compare_kernels.py --models DIR --data DIR --json FILE --timings      (on a quiet machine)
    python scripts/compare_kernels.py --json FILE --render --markdown FILE --plot FILE

Each kernel is fitted to all sites that every kernel can serve, self-attention that is not causal, on calibration
samples. A third, two thirds and all of them are converted, those first that do least to the output alone, and the
hybrid is compared with the original on held-out samples. FLOPs, milliseconds and memory are those of attention alone.
Two ablations go with it: the two ideas of the source paper (TTE, JPN), and the extras that every kernel can be given.

Results are merged into ``--json`` as they come: cases and kernels can be measured one by one, and ``--resume`` leaves
out those that are there. ``--data`` holds ``coco_val128/images``, ``stsb/stsb-en-test.csv`` and ``an4_windows``;
models are those of ``scripts/fetch_models.py``, the tiny ones those of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from comparison.cases import CASES, Case
from comparison.kernels import ENTRIES, Entry, place
from comparison.measuring import Row, measure_case, number, time_case
from comparison.rendering import markdown, plot

ABLATED_CASES = ("dinov2-392", "minilm")
"""Where the extras are ablated: one model for images and one for text."""
QUICK = ("latte (paper)", "near_far 8/2, 1/8, 2 steps")


class Results:
    """Figures by case, kept in a JSON file.

    Args:
        path: The file; what is in it stays unless it is measured again. None: memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.all: dict[str, Any] = {"cases": {}}
        if path is not None and path.is_file():
            self.all = json.loads(path.read_text(encoding="utf-8"))

    def case(self, name: str) -> dict[str, Any]:
        """What there is of a case."""
        found: dict[str, Any] = self.all["cases"].setdefault(name, {"rows": []})
        return found

    def describe(self, case: Case) -> None:
        """Say what a case is, and how good the original is at its task."""
        about = {"about": case.about, "metric": case.metric, "real": case.real}
        self.case(case.name).update(about, original_task=number(case.task(case.originals)))

    def replace(self, name: str, rows: list[Row]) -> None:
        """Put in the rows of one kernel, in place of its old ones, and write the file."""
        kernels = {row["kernel"] for row in rows}
        case = self.case(name)
        rows = [row for row in case["rows"] if row["kernel"] not in kernels] + rows
        case["rows"] = sorted(rows, key=lambda row: (place(row["kernel"]), row["sites"]))
        self.write()

    def write(self) -> None:
        """Write the file as a whole or not at all, cases in their order."""
        self.all["cases"] = {name: self.all["cases"][name] for name in CASES if name in self.all["cases"]}
        if self.path is None:
            return
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(self.all, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(self.path)


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked for, then render all that there is."""
    arguments = parse(argv)
    results = Results(arguments.json)
    if not arguments.render:
        from transformers import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        for name in arguments.case or CASES:
            work(name, arguments, results)
    text = markdown(results.all)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.plot:
        plot(results.all, arguments.plot)
    return 0


def work(name: str, arguments: argparse.Namespace, results: Results) -> None:
    """Fidelity of one case, or its timings."""
    start = time.perf_counter()
    entries = chosen(name, arguments, results)
    if not entries:
        return
    case = CASES[name](arguments.models, arguments.data, arguments.quick)
    entries = [entry for entry in entries if entry.kernel not in case.without]
    results.describe(case)
    if arguments.timings:
        timings = time_case(case, entries, rounds=3 if arguments.quick else 15)
        results.case(name).setdefault("timings", {}).update(timings)
        machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
        results.all["machine"] = {**machine, "torch": torch.__version__, "cores": os.cpu_count(), "dtype": "float32"}
        results.write()
    else:

        def save(rows: list[Row]) -> None:
            results.replace(name, rows)
            shown = ", ".join(f"{row['sites']} sites: {row['cosine'] or float('nan'):.4f}" for row in rows)
            print(f"[{time.perf_counter() - start:6.1f} s] {name}, {rows[0]['kernel']}: {shown}", flush=True)

        measure_case(case, entries, save)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def chosen(name: str, arguments: argparse.Namespace, results: Results) -> list[Entry]:
    """The kernels that are wanted of a case."""
    wanted = arguments.kernel or (QUICK if arguments.quick else [entry.label for entry in ENTRIES])
    entries = [entry for entry in ENTRIES if entry.label in wanted]
    if arguments.timings:
        return [entry for entry in entries if entry.table == "main"]
    if not arguments.kernel and name not in ABLATED_CASES:
        entries = [entry for entry in entries if entry.table != "extras"]
    if arguments.resume:
        there = {row["kernel"] for row in results.case(name)["rows"]}
        entries = [entry for entry in entries if entry.label not in there]
    return entries


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="directory of the real models")
    parser.add_argument("--data", type=Path, help="directory of the data")
    parser.add_argument("--case", choices=CASES, action="append", help="only these")
    parser.add_argument(
        "--kernel", choices=[e.label for e in ENTRIES], metavar="LABEL", action="append", help="only these"
    )
    parser.add_argument("--json", type=Path, help="results: read, added to, written")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--plot", type=Path, help="write the picture here")
    parser.add_argument("--timings", action="store_true", help="milliseconds and memory instead of fidelity")
    parser.add_argument("--resume", action="store_true", help="leave out what --json has already")
    parser.add_argument("--quick", action="store_true", help="two kernels on two samples, to see that all works")
    parser.add_argument("--render", action="store_true", help="measure nothing; tables and picture of --json")
    arguments = parser.parse_args(argv)
    if arguments.render and not arguments.json:
        parser.error("--render needs --json")
    real = [name for name in arguments.case or CASES if not name.startswith("tiny")]
    if real and not arguments.render and not (arguments.models and arguments.data):
        parser.error(f"{', '.join(real)}: give --models and --data")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
