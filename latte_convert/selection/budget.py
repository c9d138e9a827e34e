"""From errors and costs to plans: the frontier, and the point of it that a budget picks. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latte_convert.errors import GateError
from latte_convert.wording import rounded_down

Array = NDArray[Any]

NOTHING_SAVED = (
    "no kernel needs fewer FLOPs than softmax at the length of these samples. Use longer ones (--resolution for "
    "images), or smaller windows and fewer clusters"
)

LIMIT = 2000
"""Partial plans that are kept from site to site; below it the frontier is exact."""


@dataclass(frozen=True)
class SiteCost:
    """FLOPs of one site over the calibration samples.

    Attributes:
        exact: With softmax attention.
        kernels: With each of its candidate kernels.
        idle: Whether a candidate is softmax itself at these lengths: it changes nothing, and gains nothing.
    """

    exact: int
    kernels: tuple[int, ...]
    idle: tuple[bool, ...] = ()

    def saving(self, kernel: int) -> int:
        """FLOPs that a kernel saves, at least one, so that to convert as much as possible includes short sites.

        It ranks plans, no more. What is reported of them are true FLOPs, and a budget of cost asks ``that_save`` first.
        """
        return max(self.exact - self.kernels[kernel], 1)


@dataclass(frozen=True)
class Point:
    """A plan on a frontier.

    Attributes:
        kernels: Index of the candidate kernel of each converted site, by site.
        flops: Share of the attention FLOPs of all sites with softmax that are left.
        error: Predicted error of the final output, or, of a greedy plan, the measured one.
        likeness: Likeness of its least alike final output on the samples it was fitted to, where it has been measured.
        cosine: Least cosine of a final output on some of them, where it has been measured.
        merges: Share of its tokens that each merged block works on, by block, in order of execution.
    """

    kernels: Mapping[str, int]
    flops: float
    error: float
    likeness: float | None = None
    cosine: float | None = None
    merges: Mapping[str, float] = field(default_factory=dict)


def most_robust(errors: Mapping[str, Sequence[float]], count: int) -> list[str]:
    """The ``count`` sites whose best kernel hurts least, fewer where fewer have a finite error.

    Equal errors go by the order of ``errors``.
    """
    best = {site: min(values, default=float("inf")) for site, values in errors.items()}
    finite = (site for site in best if best[site] < float("inf"))
    return sorted(finite, key=best.__getitem__)[:count]


def that_work(errors: Mapping[str, Sequence[float]], costs: Mapping[str, SiteCost]) -> dict[str, list[float]]:
    """The errors with infinite ones, which no plan takes, for kernels that are softmax itself at these lengths."""
    return {
        site: [float("inf") if idle else error for error, idle in zip(values, costs[site].idle, strict=True)]
        for site, values in errors.items()
    }


def that_save(errors: Mapping[str, Sequence[float]], costs: Mapping[str, SiteCost]) -> dict[str, list[float]]:
    """The errors with infinite ones, which no plan takes, for kernels that save nothing: for a budget of cost."""
    return {
        site: [
            error if flops < costs[site].exact else float("inf")
            for error, flops in zip(values, costs[site].kernels, strict=True)
        ]
        for site, values in errors.items()
    }


def frontier(
    errors: Mapping[str, Sequence[float]],
    costs: Mapping[str, SiteCost],
    *,
    convert: Iterable[str] | None = None,
) -> list[Point]:
    """The plans that no other plan beats in both error and FLOPs, the errors of sites added up.

    Sites are taken one after another, and of the partial plans those survive that no other beats (dynamic
    programming for the multiple-choice knapsack problem). Above ``LIMIT`` survivors the cheapest in each of as many
    equal steps of FLOPs goes on, which costs at most one such step per site.

    Args:
        errors: Error of each candidate kernel of each site; an infinite one is never part of a plan.
        costs: FLOPs of each site, of all sites that count as attention.
        convert: Sites that are converted in every plan, the others in none; None leaves the choice open.

    Returns:
        Points from the most faithful to the cheapest, with strictly rising error.
    """
    forced = None if convert is None else set(convert)
    cost, error = np.zeros(1), np.zeros(1)
    history: list[tuple[Array, Array]] = []
    for site in costs:
        options = _options(errors.get(site, ()), costs[site], None if forced is None else site in forced)
        parents = np.tile(np.arange(len(cost)), len(options))
        choices = np.repeat([index for index, _, _ in options], len(cost))
        cost = np.concatenate([cost + more for _, more, _ in options])
        error = np.concatenate([error + more for _, _, more in options])
        kept = _undominated(cost, error)
        cost, error = cost[kept], error[kept]
        history.append((parents[kept], choices[kept]))
    plans = [_trace(list(costs), history, end) for end in reversed(range(len(cost)))]
    return [
        Point(kernels, flops_share(kernels, costs), float(worst))
        for kernels, worst in zip(plans, reversed(error), strict=True)
    ]


def _options(errors: Sequence[float], cost: SiteCost, forced: bool | None) -> list[tuple[int, int, float]]:
    """What can be done with a site: index of the kernel (-1: softmax), FLOPs, error.

    Where softmax is a choice, the FLOPs are those by ``SiteCost.saving``.
    """
    kernels = [
        (index, cost.kernels[index] if forced else cost.exact - cost.saving(index), max(error, 0.0))
        for index, error in enumerate(errors)
        if error < float("inf")
    ]
    if forced and kernels:
        return kernels
    return [(-1, cost.exact, 0.0)] if forced is False else [(-1, cost.exact, 0.0), *kernels]


def _undominated(cost: Array, error: Array) -> Array:
    """Indices of the pairs that no other beats, by rising cost; a thinned selection above ``LIMIT``."""
    order = np.lexsort((error, cost))
    best = np.minimum.accumulate(error[order])
    kept: Array = order[np.concatenate([[True], best[1:] < best[:-1]])]
    if len(kept) <= LIMIT:
        return kept
    low, high = cost[kept[0]], cost[kept[-1]]
    steps = ((cost[kept] - low) / (high - low) * (LIMIT - 2)).astype(int)
    first = np.concatenate([[True], steps[1:] != steps[:-1]])
    first[-1] = True  # the most faithful
    thinned: Array = kept[first]
    return thinned


def _trace(sites: Sequence[str], history: Sequence[tuple[Array, Array]], end: int) -> dict[str, int]:
    """The choices that led to a plan, softmax left out."""
    kernels = {}
    for site, (parents, choices) in zip(reversed(sites), reversed(history), strict=True):
        if choices[end] >= 0:
            kernels[site] = int(choices[end])
        end = parents[end]
    return {site: kernels[site] for site in sites if site in kernels}


def flops_share(kernels: Mapping[str, int], costs: Mapping[str, SiteCost]) -> float:
    """Share of the exact attention FLOPs that a plan leaves."""
    total = sum(cost.exact for cost in costs.values())
    left = sum(cost.kernels[kernels[site]] if site in kernels else cost.exact for site, cost in costs.items())
    return left / total if total else 1.0


def spaced(points: Sequence[Point], count: int) -> list[Point]:
    """At most ``count`` points that are spread evenly over the FLOPs of a frontier, both ends among them."""
    ends = points[0].flops, points[-1].flops
    targets = np.linspace(*ends, count)
    return [points[i] for i in sorted({int(np.argmin([abs(p.flops - t) for p in points])) for t in targets})]


def choose(
    points: Sequence[Point],
    *,
    measure: Callable[[Point], float],
    speedup: Callable[[Point], float],
    max_flops: float | None = None,
    target_speedup: float | None = None,
    min_fidelity: float | None = None,
    label: Callable[[str, int], str] = lambda _site, index: f"kernel {index}",
) -> Point:
    """The plan that a budget picks.

    A budget of cost gets the most faithful plan within it. ``min_fidelity`` alone gets the last plan that keeps it;
    beside a budget of cost it is a gate. With no budget the most faithful plan wins. Plans are measured by
    bisection, as if fidelity fell and speed rose all along the frontier.

    Args:
        points: Plans from the most faithful to the cheapest.
        measure: Measures the likeness of a plan for which it is unknown.
        speedup: Measures the speed of a plan relative to the original, end to end.
        max_flops: Highest share of the exact attention FLOPs.
        target_speedup: Lowest speed relative to the original.
        min_fidelity: Lowest likeness of the final outputs.
        label: Name of a kernel by site and index, for messages.

    Raises:
        GateError: No plan that converts anything meets the budget; the message shows the nearest.
    """

    def fidelity(point: Point) -> float:
        return measure(point) if point.likeness is None else point.likeness

    def show(point: Point) -> str:
        return _show(point, label)

    if target_speedup is not None:
        chosen = _fast_enough(points, target_speedup, speedup, show)
    elif max_flops is not None:
        chosen = _cheap_enough(points, max_flops, show)
    elif min_fidelity is not None:
        return _cheapest_faithful(points, min_fidelity, fidelity, show)
    else:
        return points[0]
    if min_fidelity is not None and chosen.kernels and not (reached := fidelity(chosen)) >= min_fidelity:
        raise GateError(
            f"no plan meets both budgets: the most faithful one within the budget of cost has a likeness of "
            f"{_below(reached)} on the calibration samples, not {min_fidelity:.6g}: {show(chosen)}. Lower "
            "--min-fidelity, allow a higher cost, or offer more faithful kernels."
        )
    return chosen


def _cheap_enough(points: Sequence[Point], most: float, show: Callable[[Point], str]) -> Point:
    points = [point for point in points if point.kernels]
    if not points:
        raise GateError(f"no plan needs at most {100 * most:.3g}% of the exact attention FLOPs: {NOTHING_SAVED}.")
    within = [point for point in points if point.flops <= most]
    if not within:
        raise GateError(
            f"no plan needs at most {100 * most:.3g}% of the exact attention FLOPs; the nearest: {show(points[-1])}. "
            "Raise --max-flops, offer a cheaper kernel, or make more sites eligible."
        )
    return within[0]


def _fast_enough(
    points: Sequence[Point], least: float, speedup: Callable[[Point], float], show: Callable[[Point], str]
) -> Point:
    points = [point for point in points if point.kernels]  # the original against itself is noise
    if not points:
        raise GateError(f"no plan is {least:g} times as fast as the original: {NOTHING_SAVED}.")
    reached: dict[int, float] = {}

    def fast(index: int) -> bool:
        reached[index] = speedup(points[index])
        return reached[index] >= least

    found = _first(len(points), fast)
    while found is None:  # speed may rise and fall again: climb from the fastest that was measured
        nearest = max(reached, key=reached.__getitem__)
        beside = [i for i in (nearest - 1, nearest + 1) if 0 <= i < len(points) and i not in reached]
        found = next((i for i in beside if fast(i)), None)
        if found is not None or max(reached, key=reached.__getitem__) != nearest:
            continue
        raise GateError(
            f"no plan is {least:g} times as fast as the original; the nearest reaches {reached[nearest]:.2f}: "
            f"{show(points[nearest])}. Lower --target-speedup, offer a cheaper kernel, or use longer inputs: what "
            "attention does not take cannot be saved."
        )
    return points[found]


def _cheapest_faithful(
    points: Sequence[Point], least: float, fidelity: Callable[[Point], float], show: Callable[[Point], str]
) -> Point:
    cheapest_first = [point for point in reversed(points) if point.kernels]
    seen: dict[int, float] = {}

    def faithful(index: int) -> bool:
        seen[index] = fidelity(cheapest_first[index])
        return seen[index] >= least

    found = _first(len(cheapest_first), faithful)
    if found is not None:
        return cheapest_first[found]
    if not seen:
        raise GateError("no kernel gives a finite output, so nothing can be converted.")
    nearest = max(seen, key=seen.__getitem__)
    raise GateError(
        f"no plan keeps a fidelity of {least:.6g} on the calibration samples, which leaves a margin for those held "
        f"out; the nearest has a likeness of {_below(seen[nearest])}: {show(cheapest_first[nearest])}. Lower "
        "--min-fidelity, or offer more faithful kernels."
    )


def _below(cosine: float) -> str:
    """Rounded down: what misses a bound must not read as if it kept it."""
    return rounded_down(cosine) if math.isfinite(cosine) else "no value (its output is not finite)"


def _first(count: int, holds: Callable[[int], bool]) -> int | None:
    """The first index that holds, as if all behind one that holds did too; None where none is found.

    The last index is tried first; where it does not hold, a few before it are.
    """
    ends = dict.fromkeys((count - 1) * quarter // 4 for quarter in (4, 3, 2, 1, 0)) if count else {}
    high = next((index for index in ends if holds(index)), None)
    if high is None:
        return None
    low = 0
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _show(point: Point, label: Callable[[str, int], str]) -> str:
    """A plan in words."""
    counts = Counter(label(site, index) for site, index in point.kernels.items())
    kernels = ", ".join(f"{count} x {name}" for name, count in counts.most_common()) or "nothing converted"
    return f"{len(point.kernels)} sites converted ({kernels}), {point.flops:.1%} of the exact attention FLOPs"
