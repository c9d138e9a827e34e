"""Plans made of measured time: kernels and merging together, whichever loses least at the speed that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from latte_convert.calibration.fitted import Fitted
from latte_convert.data.feed import FirstOf
from latte_convert.errors import GateError, RecipeError
from latte_convert.kernels.registry import get_kernel, kernel_names
from latte_convert.selection.budget import Point, SiteCost, frontier
from latte_convert.selection.clock import Clock
from latte_convert.selection.costs import merged_share
from latte_convert.selection.merging import Mergeable, mergeable, schedule
from latte_convert.selection.points import changes_of, drifts_of, kernels_of, speed_of
from latte_convert.task import Task
from latte_convert.wording import some

COUNTED_ON = 4
"""Calibration samples that the error of a plan that merges is measured on."""
BENDS = (1.0, 0.6, 0.35, 0.2)
"""Schedules that are tried: 1 merges as many tokens after each block, less merges most of them after the first ones,
which is faster where attention takes most of the time."""
USUAL = 1
"""The one of them that the others are compared with."""
MIXED = 5
"""Plans of the frontier that are tried together with merging: the last, and each time the one half as far."""
TIMED = 2
"""Plans whose merging is set by measured time, of those that are foretold to lose least."""


def merged(task: Task, fitted: Fitted, point: Point) -> Point:
    """A plan with the merging that the recipe asks for.

    Raises:
        RecipeError: The model has no blocks for it, or a kernel of the plan takes no merged tokens.
    """
    assert task.recipe.merge is not None
    found = _mergeable(task, fitted)
    if not found.blocks:
        raise RecipeError(f"merge: tokens of this model cannot be merged: {found.reason}. Leave merge out.")
    if strange := next((k.name for k in kernels_of(fitted, point).values() if not k.takes_merged), None):
        takers = [name for name in kernel_names() if get_kernel(name).takes_merged]
        raise RecipeError(
            f"merge: kernel '{strange}' has no form for merged tokens. Set kernel to one that has ({some(takers)}), "
            "or ratio to 0 to merge only."
        )
    point = replace(point, merges=schedule(found.blocks, task.recipe.merge))
    return _measured(task, fitted, [point])[0]


def fast_enough(
    task: Task,
    fitted: Fitted,
    errors: Mapping[str, Sequence[float]],
    costs: Mapping[str, SiteCost],
    alone: Callable[[], Point],
) -> list[Point]:
    """The plans that were found to reach ``target_speedup``, with kernels, with merging, or with both: the best first.

    What each number of converted sites and each schedule would take is foretold from a few measured times, and what
    they lose is measured on calibration samples. The best two are then set by the clock.

    Args:
        task: The task.
        fitted: The kernels of each site.
        errors: Error of each kernel of each site; infinite where it saves nothing.
        costs: FLOPs of each of them.
        alone: Picks a plan without merging that is fast enough, where it is known that tokens cannot be merged.

    Raises:
        GateError: No plan is.
    """
    target = task.recipe.target_speedup
    assert target is not None
    blocks = _mergeable(task, fitted).blocks
    if not blocks:
        return [alone()]
    inside = {task.host.block(site): site for site in fitted.kernels}
    clock = Clock({block: inside[block] for block in blocks}, lambda point: speed_of(task, fitted, point))
    fast = [found for base, bend in _promising(task, fitted, clock, _bases(fitted, clock, errors, costs), target)
            if (found := clock.lightest(base, target, bend)) is not None]  # fmt: skip
    fastest, most = clock.fastest
    if not fast and most >= target:
        fast = [fastest]
    refusal = ""
    if not _takes_merged(fitted):
        try:
            fast.append(alone())
        except GateError as error:
            refusal = f" Without merging: {error}"
    if not fast:
        raise GateError(
            f"no plan is {target:g} times as fast as the original; the fastest that merges tokens reaches "
            f"{most:.2f}. Lower --target-speedup, or use longer inputs (--resolution).{refusal}"
        )
    return sorted(_measured(task, fitted, fast), key=lambda point: point.error)


def _measured(task: Task, fitted: Fitted, points: Sequence[Point]) -> list[Point]:
    """Plans with their errors, their fidelity and, where they merge, the FLOPs that they were seen to take."""
    drifts = drifts_of(task, fitted, points, COUNTED_ON)
    return [
        replace(
            point,
            flops=_flops(task, fitted, point),
            error=drift.error,
            likeness=drift.worst.likeness,
            cosine=drift.least_cosine.cosine,
        )
        for point, drift in zip(points, drifts, strict=True)
    ]


def _flops(task: Task, fitted: Fitted, point: Point) -> float:
    """Share of the attention FLOPs of softmax that a plan leaves."""
    if not point.merges:
        return point.flops
    return merged_share(task.host, fitted.kernels, changes_of(fitted, point), FirstOf(task.fitting, 1))


def _mergeable(task: Task, fitted: Fitted) -> Mergeable:
    """The blocks that a plan may merge the tokens of."""
    if task.recipe.merge == 1:
        return Mergeable(reason="the recipe says merge: 1")
    return mergeable(task.host, fitted.sites, FirstOf(task.fitting, 1))


def _takes_merged(fitted: Fitted) -> bool:
    """Whether every kernel has a form for merged tokens."""
    return all(kernel.takes_merged for kernels in fitted.kernels.values() for kernel in kernels)


def _bases(
    fitted: Fitted, clock: Clock, errors: Mapping[str, Sequence[float]], costs: Mapping[str, SiteCost]
) -> list[Point]:
    """Kernels that go with merging: none, and those of some of the sites where they save much and lose little."""
    none = Point({}, 1.0, 0.0)
    if not _takes_merged(fitted):
        return [none]
    shares = dict(zip(clock.blocks.values(), schedule(list(clock.blocks), 0.5, BENDS[USUAL]).values(), strict=True))
    weighed = {
        site: replace(
            cost,
            exact=round(cost.exact * shares.get(site, 1.0) ** 2),
            kernels=tuple(round(each * shares.get(site, 1.0)) for each in cost.kernels),
        )
        for site, cost in costs.items()
    }
    points = frontier(errors, weighed)
    places = {round(len(points) / 2**halving) for halving in range(MIXED)}
    return [none, *(points[place - 1] for place in sorted(places) if place > 1)]


def _promising(
    task: Task, fitted: Fitted, clock: Clock, bases: Sequence[Point], target: float
) -> list[tuple[Point, float]]:
    """Kernels and bends of the schedules that are foretold to lose least at the speed, the best first.

    Bends are tried with the fewest kernels there are, from the usual one on as long as they get better; then every
    number of kernels with the best bend.
    """
    for base in bases[1:]:
        clock.time(replace(base, merges=schedule(list(clock.blocks), 0.5, BENDS[USUAL])))
    errors: dict[tuple[int, int], float] = {}

    def look(pairs: Sequence[tuple[int, int]]) -> None:
        plans = {pair: clock.lighter(bases[pair[0]], 1 / target, BENDS[pair[1]]) for pair in pairs}
        known = {pair: plan for pair, plan in plans.items() if plan is not None}
        drifts = drifts_of(task, fitted, list(known.values()), COUNTED_ON) if known else []
        errors.update({pair: drift.error for pair, drift in zip(known, drifts, strict=True)})

    def error(bend: int) -> float:
        return errors.get((few, bend), float("inf"))

    few = min(1, len(bases) - 1)
    look([(few, USUAL), (few, USUAL + 1)])
    bend, step = (USUAL + 1, 1) if error(USUAL + 1) <= error(USUAL) else (USUAL, -1)
    while 0 <= bend + step < len(BENDS):
        look([(few, bend + step)])
        if error(bend + step) >= error(bend):
            break
        bend += step
    look([(number, bend) for number in range(len(bases)) if number != few])
    ranked = sorted(errors, key=errors.__getitem__)[:TIMED]
    return [(bases[number], BENDS[bend]) for number, bend in ranked]
