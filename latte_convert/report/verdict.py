"""Is the hybrid worth it: speed, memory and fidelity at the user's size, what limits them, and what to type next."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import PurePath

from latte_convert.bench.result import LengthResult
from latte_convert.report import text
from latte_convert.report.schema import Report

SAME_SPEED = 0.03
"""Forward times closer than this share of each other are called equal: a median of few runs shows no less."""

SAME_LENGTH = 0.1
"""A length of ``latte bench`` is the user's size where the held-out samples differ from it by no more than this."""

MOST = 0.99
"""A share of the time above which a measurement is not believed: something else than attention takes time, too."""

ENOUGH = 0.95
"""Retention of a task metric from which on the page calls the task kept."""


@dataclass(frozen=True)
class Level:
    """What a likeness is called; ``floor`` is the lowest one that still deserves it."""

    floor: float
    span: str
    label: str


LEVELS = (
    Level(0.99, "0.99 and up", "very close"),
    Level(0.95, "0.95 to 0.99", "close"),
    Level(0.85, "0.85 to 0.95", "noticeably different"),
    Level(-math.inf, "below 0.85", "far from the original"),
)
"""Best first. Rules of thumb for reading a likeness, not a promise about any task."""


def level_of(likeness: float) -> Level:
    """The first level whose floor ``likeness`` reaches."""
    return next(level for level in LEVELS if likeness >= level.floor)


@dataclass(frozen=True)
class Worth:
    """The first screen of the page; what was not measured is None.

    Attributes:
        speedup: Time of the original over that of the hybrid, one held-out sample or one of its length.
        speed_detail: The times behind it, and where they were taken.
        memory: Peak memory of a forward pass over the original's.
        memory_detail: The sizes behind it.
        likeness: Held-out likeness of the primary output.
        verdict: Whether converting pays, in a sentence.
        limit: What keeps the hybrid from being faster.
        step: What to do next, and why.
        command: How to do it.
    """

    speedup: float | None
    speed_detail: str
    memory: float | None
    memory_detail: str
    likeness: float
    verdict: str
    limit: str | None
    step: str
    command: str


def worth_of(report: Report, directory: str = ".") -> Worth | None:
    """What the report says of the hybrid; None where nothing was converted and measured.

    Args:
        report: The report.
        directory: The artifact's directory, as the commands shall name it.
    """
    if report.fidelity is None:
        return None
    length = _bench_length(report)
    speedup, speed_detail = _speed(report, length)
    memory, memory_detail = _memory(length)
    likeness = report.fidelity.least.alike
    step, command = next_step(report, directory)
    return Worth(
        speedup=speedup,
        speed_detail=speed_detail,
        memory=memory,
        memory_detail=memory_detail,
        likeness=likeness,
        verdict=_verdict(report, speedup, memory, likeness),
        limit=_limit(length, report),
        step=step,
        command=command,
    )


def tokens_of(report: Report) -> float | None:
    """The longest sequence that a site saw on held-out samples, as their mean: the user's size."""
    return max(report.cost.tokens.values(), default=None) if report.cost else None


def _bench_length(report: Report) -> LengthResult | None:
    """What ``latte bench`` measured at the user's size."""
    tokens = tokens_of(report)
    if report.bench is None or not tokens:
        return None
    nearest = min(report.bench.lengths, key=lambda length: abs(length.tokens - tokens), default=None)
    return nearest if nearest and abs(nearest.tokens - tokens) <= SAME_LENGTH * tokens else None


def _speed(report: Report, length: LengthResult | None) -> tuple[float | None, str]:
    """By ``latte bench`` where it measured this size, by the held-out samples otherwise."""
    if length and report.bench:
        original, hybrid = length.variant("original"), length.variant("hybrid")
        if original and hybrid and original.forward and hybrid.forward:
            ratio = hybrid.forward_ratio or hybrid.forward.median_ms / original.forward.median_ms
            return 1 / ratio, (
                f"{text.number(original.forward.median_ms)} → {text.number(hybrid.forward.median_ms)} ms, "
                f"{length.label} ({length.tokens:,} tokens), {_machine(report.bench.device, report.bench.threads)}"
            )
    times = report.cost.forward_ms if report.cost else {}
    before, after = times.get("original"), times.get("hybrid")
    if not before or not after or report.cost is None:
        return None, ""
    tokens = tokens_of(report)
    size = f", {tokens:,.0f} tokens" if tokens else ""
    machine = _machine(report.cost.device, report.cost.threads)
    return before / after, f"{text.number(before)} → {text.number(after)} ms a held-out sample{size}, {machine}"


def _machine(device: str, threads: int) -> str:
    return f"{device}, {threads} thread{'' if threads == 1 else 's'}"


def _memory(length: LengthResult | None) -> tuple[float | None, str]:
    original, hybrid = (length.variant("original"), length.variant("hybrid")) if length else (None, None)
    before, after = (each.forward_memory_bytes if each else None for each in (original, hybrid))
    if not before or not after:
        return None, ""
    return after / before, f"of the original's: {text.size(before)} → {text.size(after)} at the peak of a forward pass"


def _verdict(report: Report, speedup: float | None, memory: float | None, likeness: float) -> str:
    """Whether converting pays at this size."""
    if not report.changed:
        return "No site was converted: this hybrid is the original."
    closeness = level_of(likeness).label
    if speedup is None:
        return f"Its outputs are {closeness}; whether it is faster was not measured."
    if speedup <= 1 + SAME_SPEED:
        pace = "as fast as the original" if speedup >= 1 - SAME_SPEED else f"{1 / speedup:.2f} times slower"
        saves = f" It needs {text.percent(1 - memory)} less memory." if memory is not None and memory < 0.9 else ""
        return f"Not worth it at this size: the hybrid is {pace}.{saves}{_crossover(report)}"
    pace = f"{speedup:.2f} times faster"
    kept = retained(report)
    if kept is not None:
        if kept >= ENOUGH:
            return f"Worth it: {pace}, and the task keeps {text.percent(kept)} of its metric."
        return f"Not worth it: {pace}, but the task keeps only {text.percent(kept)} of its metric."
    if likeness >= LEVELS[1].floor:
        return f"Worth it if your task holds: {pace}, outputs {closeness}."
    return f"Doubtful: {pace}, but the outputs are {closeness}."


def _crossover(report: Report) -> str:
    if report.bench is None:
        return " Longer inputs may pay."
    found = report.bench.crossover.tokens
    if found is None:
        return f" It does not pay up to {max(length.tokens for length in report.bench.lengths):,} tokens."
    return f" It pays from {found:,} tokens on."


def _limit(length: LengthResult | None, report: Report) -> str | None:
    """Amdahl's law: by ``latte bench``, which times the converted attention, or by the held-out samples without any.

    Merging shortens more than attention: it has no such limit.
    """
    if not report.converted or report.merges:
        return None
    original = length.variant("original") if length else None
    if original and original.forward and original.attention:
        what, share = "The converted attention", original.attention.median_ms / original.forward.median_ms
    elif times := _without_attention(report):
        what, share = "All attention", 1 - times[0] / times[1]
    else:
        return None
    if not 0 < share < MOST:
        return None
    return (
        f"{what} takes {text.percent(share)} of the original's time at this size: were it free, the model would be "
        f"{1 / (1 - share):.2f} times as fast."
    )


def _without_attention(report: Report) -> tuple[float, float] | None:
    """Time of a held-out sample with attention left out, and with it."""
    times = report.cost.forward_ms if report.cost else {}
    free, whole = times.get("without_attention"), times.get("original")
    return (free, whole) if free and whole else None


def retained(report: Report) -> float | None:
    """The least retention of a task's primary metric; None without an evaluation."""
    rows = [evaluation.metrics[evaluation.primary].retention for evaluation in report.evaluations or ()]
    return min((row for row in rows if row is not None), default=None)


def next_step(report: Report, directory: str = ".") -> tuple[str, str]:
    """What to do next with an artifact, and the command that does it.

    Args:
        report: Its report.
        directory: Its directory, as the command shall name it.
    """
    place = shlex.quote(directory)
    kept = retained(report)
    likeness = report.fidelity.least.alike if report.fidelity else 1.0
    speedup, _ = _speed(report, _bench_length(report))
    if not report.changed:
        return "Convert more sites:", _convert(report, _share(0.5))
    if (kept is not None and kept < ENOUGH) or (kept is None and likeness < LEVELS[2].floor):
        if (target := report.recipe.get("target_speedup")) is not None:
            return "Ask for less speed:", _convert(report, f"--target-speedup {1 + (target - 1) / 2:.3g}")
        return "Convert fewer sites:", _convert(report, _share(len(report.converted) / _eligible(report) / 2))
    if report.bench is None and speedup is not None and speedup <= 1 + SAME_SPEED:
        return "Find the length from which it pays:", f"latte bench {place} --save"
    if kept is None:
        task, data = _task(report)
        saved = shlex.quote(str(PurePath(directory) / f"eval-{task}.json"))
        return "Measure your task:", f"latte eval {place} --task {task} --data {data} --out {saved}"
    if report.bench is None:
        return "Measure time and memory over lengths:", f"latte bench {place} --save"
    if report.bench.crossover.tokens and report.bench.min_tokens_written is None:
        return "Keep shorter inputs exact, where it does not pay:", f"latte bench {place} --write"
    return "Check the files before you ship them:", f"latte verify {place}"


def _share(ratio: float) -> str:
    """The option for a share of the sites."""
    return f"--ratio {math.floor(100 * ratio) / 100:g}"


def _convert(report: Report, option: str) -> str:
    """The conversion again, with another budget."""
    if not report.source.sha256:
        name, value = option.removeprefix("--").replace("-", "_").split()
        return f"convert(model, batches, recipe=Recipe({name}={value}))"
    data = " ".join(f"--calib {shlex.quote(place)}" for place in report.calibration.source.split(", "))
    return f"latte convert {shlex.quote(report.source.id)} {data} {option} --out hybrid-2"


def _eligible(report: Report) -> int:
    return sum(site.eligible for site in report.sites)


def _task(report: Report) -> tuple[str, str]:
    """The task that fits the model's class best, and what its data is."""
    name, modality = report.source.model_class, report.calibration.modality
    for part, task, data in (
        ("Detection", "detection", "COCO.json --data IMAGES"),
        ("Classification", "classification", "LABELLED"),
        ("CLIP", "zero-shot", "LABELLED"),
        ("Siglip", "zero-shot", "LABELLED"),
        ("Whisper", "asr", "SPEECH"),
    ):
        if part in name:
            return task, data
    if modality.startswith("image"):
        return "knn", "LABELLED"
    return ("sts", "PAIRS") if modality.startswith("text") else ("fidelity", "SAMPLES")
