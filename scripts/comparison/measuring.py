"""What is measured of a kernel on a case: fidelity, task metric and FLOPs by number of layers; time and memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from comparison.cases import Case, outputs
from comparison.kernels import Entry
from latte_convert.adapters.convert import Applied
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, AttentionSite, CallShape
from latte_convert.bench.memory import peak_memory
from latte_convert.bench.timing import Timed, ratio, take_turns, timing
from latte_convert.calibration.fit import Fit
from latte_convert.calibration.pipeline import calibrate, recalibrate
from latte_convert.data.feed import BatchFeed
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.agreement import Agreement
from latte_convert.measuring.outputs import named_outputs, primary_output
from latte_convert.selection.isolated import isolated_scores

LEVELS = (1 / 3, 2 / 3, 1.0)
"""Shares of the sites that are converted; ablations take the middle one."""
TOGETHER = 8
"""Kernels that are fitted in the same passes; more need more memory."""
SCORED = 2
"""Calibration samples that the choice of sites looks at."""
ABLATED = 8
"""Held-out samples of the ablations of extras."""

Row = dict[str, Any]
Save = Callable[[list[Row]], None]


@dataclass(frozen=True)
class Probe:
    """What one pass of the original tells of a case.

    Attributes:
        host: The model with the adapter of its library.
        sites: The sites that every kernel can serve.
        calls: The call of each of them on the first held-out sample.
    """

    host: Host
    sites: list[AttentionSite]
    calls: dict[str, AttentionCall]

    @property
    def tokens(self) -> int:
        """Keys of a call, without the prefix."""
        shape = next(iter(self.shapes.values()))
        return shape.keys - shape.layout.prefix

    @property
    def shapes(self) -> dict[str, CallShape]:
        """Shape of each site's call."""
        return {name: call.shape for name, call in self.calls.items()}


def probe(case: Case) -> Probe:
    """Run the original once and keep what its attention sees."""
    host = Host.of(case.model)
    sites = [
        site
        for site in host.sites()
        if site.eligible and site.kind == "self" and not site.causal and case.tower in (None, site.tower)
    ]
    calls: dict[str, AttentionCall] = {}
    handlers = {site.name: partial(calls.__setitem__, site.name) for site in sites}  # leaves the call to the original
    with host.watch(handlers):
        outputs(case.model, case.holdout[:1])
    return Probe(host, sites, calls)


def measure_case(case: Case, entries: Sequence[Entry], save: Save) -> None:
    """Measure kernels on a case, and save the rows of each as soon as they are there."""
    seen = probe(case)
    for start in range(0, len(entries), TOGETHER):
        group = entries[start : start + TOGETHER]
        candidates = [entry.candidate(seen.tokens) for entry in group]
        fits = calibrate(seen.host, seen.sites, candidates, BatchFeed(case.fitting))
        for i, entry in enumerate(group):
            save(measure_kernel(case, seen, entry, {name: each[i] for name, each in fits.items()}))


def measure_kernel(case: Case, seen: Probe, entry: Entry, fits: Mapping[str, Fit]) -> list[Row]:
    """One row for each number of converted sites, the most robust of them first."""
    kernels = {name: fit.kernel for name, fit in fits.items() if fit.kernel is not None}
    ranked = rank(case, seen, kernels)
    counts = [max(1, round(level * len(seen.sites))) for level in LEVELS]
    if entry.table != "main":
        counts = counts[1:2]
    rows = []
    for count in dict.fromkeys(counts):
        chosen = {name: kernels[name] for name in ranked[:count]}
        errors = {name: fits[name].error for name in chosen}
        if entry.propagate:
            refits = refit(case, seen, entry, list(chosen))
            chosen = {name: fit.kernel for name, fit in refits.items() if fit.kernel is not None}
            errors = {name: refits[name].error for name in chosen}
        kernel = next(iter(kernels.values()))
        rows.append({
            "kernel": entry.label,
            "name": entry.kernel,
            "table": entry.table,
            "variant": entry.variant,
            "options": kernel.options,
            "sites": len(chosen),
            "of": len(seen.sites),
            "converted": sorted(chosen),
            "fit_error": statistics.fmean(error or 0.0 for error in errors.values()),
            **cost(chosen, seen.shapes),
            **fidelity(case, seen, chosen, entry),
        })  # fmt: skip
    return rows


def refit(case: Case, seen: Probe, entry: Entry, names: Sequence[str]) -> dict[str, Fit]:
    """Fits of some sites, each on what it gets behind those before it; sites are listed in the order they run in."""
    sites = [site for site in seen.sites if site.name in names]
    candidates = dict.fromkeys(names, entry.candidate(seen.tokens))
    return recalibrate(seen.host, sites, candidates, BatchFeed(case.fitting))


def rank(case: Case, seen: Probe, kernels: Mapping[str, Kernel]) -> list[str]:
    """Sites by what converting each alone does to the output on calibration samples."""
    sites = [site for site in seen.sites if site.name in kernels]
    candidates = {name: [kernel] for name, kernel in kernels.items()}
    scores = isolated_scores(seen.host, sites, candidates, BatchFeed(case.fitting[:SCORED]))
    return sorted(scores, key=lambda name: scores[name][0].value)


def cost(kernels: Mapping[str, Kernel], shapes: Mapping[str, CallShape]) -> Row:
    """FLOPs of the converted sites on one sample, and what share that is of softmax attention's on the same sites."""
    flops = sum(kernel.flops(shapes[name]) for name, kernel in kernels.items())
    return {"flops": flops, "flops_share": flops / sum(softmax_flops(shapes[name]) for name in kernels)}


def fidelity(case: Case, seen: Probe, kernels: Mapping[str, Kernel], entry: Entry) -> Row:
    """Agreement of the final output on held-out samples, and what the model is for."""
    ablation = entry.table == "extras"
    held = case.holdout[:ABLATED] if ablation else case.holdout
    with seen.host.convert(kernels) as applied:
        found = outputs(case.model, held)
        share = exact_share(applied)
        task = None if ablation else case.task(found)
        whole = exact_share(applied)
    prefix = max(shape.layout.prefix for shape in seen.shapes.values())
    agreements: dict[str, Agreement] = {}
    for original, hybrid in zip(case.originals, found, strict=False):  # the first of them in ablations
        converted = dict(named_outputs(hybrid, prefix))
        for name, tensor in named_outputs(original, prefix):
            agreements.setdefault(name, Agreement()).add(tensor, converted[name])
    primary = primary_output(agreements)
    return {
        "held_out": len(held),
        "output": primary,
        "cosine": number(agreements[primary].cosine),
        "relative_error": number(agreements[primary].relative_error),
        "cosines": {name: number(each.cosine) for name, each in agreements.items()},
        "task": number(task),
        "exact_share": share,
        "task_exact_share": whole,
    }


def exact_share(applied: Applied) -> float:
    """Share of the calls that ran softmax, since nothing is cheaper on so few tokens; the count begins anew."""
    handlers = applied.handlers.values()
    calls, exact = (sum(getattr(handler, name) for handler in handlers) for name in ("calls", "exact_calls"))
    for handler in handlers:
        handler.calls = handler.exact_calls = 0
    return exact / max(calls, 1)


def number(value: float | None) -> float | None:
    """A number that JSON has; None for what it has not."""
    return value if value is not None and math.isfinite(value) else None


@torch.inference_mode()
def time_case(case: Case, entries: Sequence[Entry], *, rounds: int) -> dict[str, Row]:
    """Milliseconds and bytes of attention alone, on what a middle site of the original sees, all kernels in turns.

    What a kernel is fitted to does not change how long it takes, so none is fitted here.
    """
    seen = probe(case)
    site = seen.sites[len(seen.sites) // 2]
    call = seen.calls[site.name]
    kernels: dict[str, Kernel] = {"exact": ExactKernel(site.heads, site.head_dim)}
    for entry in entries:
        candidate = entry.candidate(seen.tokens)
        kernels[entry.label] = get_kernel(candidate.kernel)(site.heads, site.head_dim, **candidate.options)
    runs = {name: partial(kernel, call) for name, kernel in kernels.items()}
    device = call.query.device
    times = take_turns({n: Timed(r, nullcontext) for n, r in runs.items()}, device, rounds=rounds, seconds=120)
    rows = {}
    for name, each in times.items():
        taken = timing(each)
        rows[name] = {
            "ms": taken.median_ms,
            "lower_ms": taken.lower_ms,
            "upper_ms": taken.upper_ms,
            "of_exact": ratio(each, times["exact"]),
            "peak_bytes": peak_memory(runs[name], device),
        }
    return rows
