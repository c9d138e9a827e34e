"""Attack the command line: damaged artifacts, checkpoints, recipes, samples and reports, kills, and full disks.

Whatever it is given, a command must end, with a sentence and an exit code of the contract, run no code that came with
its input, open no socket, start no program, write nothing outside its folders, and leave nothing behind. Every case
follows from the seed and its number, so ``--only NUMBER --keep FOLDER`` repeats one and keeps its files.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fuzzing import cases, damage, samples, surroundings
from fuzzing.cases import Case, Maker
from fuzzing.watching import MEMORY, Outcome, Run, Watched, start

KINDS: dict[str, tuple[Maker, int]] = {
    "artifact": (cases.artifact, 26),
    "checkpoint": (cases.checkpoint, 17),
    "recipe": (cases.recipe, 13),
    "data": (samples.data, 19),
    "results": (cases.results, 13),
    "kill": (cases.kill, 3),
    "full": (cases.full, 1),
    "place": (surroundings.place, 2),
    "meddle": (surroundings.meddle, 2),
    "environment": (surroundings.environment, 2),
}
"""Makers of cases, and how often each has its turn."""
REAL = 0.01
"""Share of the cases whose commands are processes of their own, as a user starts them."""


@dataclass
class Attack:
    """A case under way: where it is, and what it has shown so far."""

    number: int
    case: Case
    place: Path
    started: float = field(default_factory=time.monotonic)
    watched: Watched | None = None
    done: int = 0
    faults: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    shortage: bool = False

    def step(self) -> bool:
        """Go on with it; whether it is over."""
        if self.watched is None:
            self.watched = start(self.case.runs[self.done], self.place)
        outcome = self.watched.poll()
        if outcome is None:
            return False
        run = self.case.runs[self.done]
        self.codes.append(outcome.code)
        self.shortage |= "out of memory" in outcome.stderr
        self.faults += [f"{' '.join(run.arguments)[:300]}: {fault}" for fault in faults(run, outcome, self)]
        self.watched, self.done = None, self.done + 1
        return bool(self.faults) or self.done == len(self.case.runs)


def faults(run: Run, outcome: Outcome, attack: Attack) -> Iterator[str]:
    """What a command did that it may never do."""
    said = outcome.stderr.strip().splitlines()
    last = said[-1] if said else "nothing was said"
    if outcome.hung:
        yield "it hangs"
    elif outcome.killed and run.kill and outcome.code in (-run.kill[0], 128 + run.kill[0]):
        if "Traceback" in outcome.stderr:
            yield f"a traceback: {last}"
        return
    elif outcome.code not in run.codes:
        yield f"exit code {outcome.code}: {last[:400]}"
    elif outcome.code and 2 not in run.closed and not _is_told(outcome):
        yield f"exit code {outcome.code} without a sentence: {last[:200]}"
    if "Traceback (most recent" in outcome.stderr or "Exception ignored" in outcome.stderr:
        yield f"a traceback: {last[:200]}"
    if run.arguments[:1] == ("verify",) and outcome.code == 0 and attack.case.changed:
        yield "accepted"
    yield from outcome.seen
    yield from left_behind(run, outcome, attack.place)
    for path, content in attack.case.keep.items():
        if not path.is_file() or path.read_bytes() != content:
            yield f"{path.relative_to(attack.place / 'work')} is not what it was"


def _is_told(outcome: Outcome) -> bool:
    """Whether a command says why it ends; of a bad call typer does."""
    lines = (outcome.stderr + "\n" + outcome.stdout).splitlines()
    return any(line.lstrip().startswith(("latte: ", "│ ", "Usage: ")) for line in lines)


def left_behind(run: Run, outcome: Outcome, place: Path) -> Iterator[str]:
    """What must not be there after a command that was not killed."""
    work = place / "work"
    if (work / damage.MARKER).exists():
        yield "code of the input has run"
    if outcome.code and run.absent is not None and os.path.lexists(run.absent):
        yield f"{run.absent.name} is there although the command failed"
    for path in (*work.rglob(".*.tmp-*"), *(place / "tmp").iterdir()) if run.clean else ():
        if path.name != ".ses":  # onnxruntime's, from its import
            yield f"left behind: {path.name}"
    for path in work.rglob("*.html"):
        if path.is_file() and damage.PAYLOAD.encode() in path.read_bytes():
            yield f"{path.name} holds the payload as it is"


def make(number: int, seed: int, kinds: list[str], material: Path, places: Path) -> Attack:
    """The case of a number, with its files."""
    random = Random(f"{seed}:{number}")  # noqa: S311 (repeatable, not secret)
    kind = random.choices(kinds, [KINDS[kind][1] for kind in kinds])[0]
    place = places / str(number)
    (place / "work").mkdir(parents=True)
    case = KINDS[kind][0](random, material, place / "work")
    if random.random() < REAL:
        case.runs = [Run(**{**vars(run), "real": True, "kill": None}) for run in case.runs]
    return Attack(number, case, place)


def attack(numbers: list[int], options: argparse.Namespace, material: Path, places: Path) -> list[Attack]:
    """Run cases, a few at a time; they come back in the order in which they end."""
    waiting, running, ended = list(reversed(numbers)), [], []  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(make(waiting.pop(), options.seed, options.kinds, material, places))
        over = [each for each in running if each.step()]
        for each in over:
            running.remove(each)
            ended.append(each)
            if each.faults:
                print(f"case {each.number} ({each.case.kind}): {each.case.what[:300]}")
                print("".join(f"    {fault}\n" for fault in each.faults), end="", flush=True)
            if not options.keep:
                _remove(each.place)
        if not over:
            time.sleep(0.003)
        if time.monotonic() > options.until:
            waiting.clear()
    return ended


def _remove(place: Path) -> None:
    for path in place.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(place)


COLUMNS = ("cases", "runs", *(f"exit {code}" for code in (0, 2, 3, 4, 5, 130, 143)), "killed", "no memory", "faults")


def counts(ended: list[Attack]) -> dict[str, list[int]]:
    """For every kind, and for all: its cases, their runs, how those ended, and the cases with a fault."""
    found = {}
    for kind in [*dict.fromkeys(each.case.kind for each in ended), "all"]:
        own = [each for each in ended if kind in (each.case.kind, "all")]
        codes = collections.Counter(code for each in own for code in each.codes)
        ends = [codes[code] for code in (0, 2, 3, 4, 5, 130, 143, -9)]
        faulty, short = (sum(bool(getattr(each, name)) for each in own) for name in ("faults", "shortage"))
        found[kind] = [len(own), codes.total(), *ends, short, faulty]
    return found


def show(ended: list[Attack], seed: int) -> None:
    """Counts of every kind."""
    print(f"{'kind':<12}" + "".join(f"{name:>10}" for name in COLUMNS))
    for kind, row in counts(ended).items():
        print(f"{kind:<12}" + "".join(f"{count:>10}" for count in row))
    failed = [each for each in ended if each.faults]
    if failed:
        numbers = " ".join(str(each.number) for each in failed[:5])
        repeat = f"python scripts/fuzz.py --seed {seed} --only {numbers} --keep cases"
        print(f"{len(failed)} of {len(ended)} cases failed. Repeat: {repeat}")


def render(ended: list[Attack], options: argparse.Namespace, seconds: float) -> str:
    """The outcome as a page: what was tried, how it ended, how long it took, and where."""
    import torch
    import transformers

    limit = f" --limit {options.limit:.0f}" if options.limit and len(ended) < options.count else ""
    lines = [
        "# Attacks on the command line",
        "",
        f"`python scripts/fuzz.py --seed {options.seed} --count {options.count} --jobs {options.jobs}{limit}`: "
        f"{len(ended):,} "
        f"cases in {seconds / 60:.1f} minutes on {os.cpu_count()} cores, PyTorch {torch.__version__}, Transformers "
        f"{transformers.__version__}. A fault is an exit code that the README does not have, an end without a "
        "sentence, a traceback, more than a minute of processor time, code of the input that runs, a socket, a program "
        "that is started, a file outside, a file left behind, a lost or half-written result. `killed` counts SIGKILL; "
        f"`no memory` counts cases that said so with {MEMORY >> 30} GB.",
        "",
        f"| kind | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
        *(f"| {kind} | {' | '.join(f'{count:,}' for count in row)} |" for kind, row in counts(ended).items()),
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where a command did what it may never do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="cases [2000]")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="repeat these cases")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of attack [all]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at once [cores]")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no case later than this")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the outcome as Markdown")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the files of every case here")
    options = parser.parse_args(arguments)
    options.started = time.monotonic()
    os.environ.update(
        HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    import torch

    torch.set_num_threads(1)  # a fork has no threads of its parent
    from fuzzing.material import build

    temporary = Path(tempfile.mkdtemp(prefix="latte-fuzz-"))  # no object whose finaliser a fork would run
    try:
        build(temporary / "material")
        gc.collect()
        gc.freeze()  # what is collected in a fork is copied there first
        print(f"material in {time.monotonic() - options.started:.0f} s", flush=True)
        options.until = time.monotonic() + (options.limit or float("inf"))
        numbers = options.only or list(range(options.count))
        ended = attack(numbers, options, temporary / "material", options.keep or temporary / "cases")
    finally:
        shutil.rmtree(temporary)
    show(ended, options.seed)
    seconds = time.monotonic() - options.started
    print(f"{seconds:.0f} s")
    if options.write:
        options.write.write_text(render(ended, options, seconds), encoding="utf-8")
    return int(any(each.faults for each in ended))


if __name__ == "__main__":
    sys.exit(main())
