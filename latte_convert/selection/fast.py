"""Plans made of measured time: kernels, merging, or both, whichever loses least at the speed that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from latte_convert.calibration.fitted import Fitted
from latte_convert.calibration.pipeline import calibrate
from latte_convert.data.feed import FirstOf
from latte_convert.errors import GateError, RecipeError
from latte_convert.kernels.registry import get_kernel, kernel_names
from latte_convert.progress import Progress, silent
from latte_convert.recipe import Candidate
from latte_convert.selection.budget import Point, spaced
from latte_convert.selection.costs import merged_share
from latte_convert.selection.isolated import isolated_scores
from latte_convert.selection.merging import BENDS, Clock, Mergeable, lightest, mergeable, schedule
from latte_convert.selection.points import changes_of, drifts_of, kernels_of, speed_of
from latte_convert.selection.scores import Score
from latte_convert.task import Task
from latte_convert.wording import some

COUNTED_ON = 4
"""Calibration samples that the error of a plan that merges is measured on."""
MIXED = 2
"""Plans of the frontier that are tried together with merging."""
TAKER = "blocks"
"""The kernel of the first sites of a plan that merges, where the recipe has none that takes merged tokens."""
FIRST = 1 / 3
"""Share of the sites that are the first: they have most of the tokens, and later ones lose more by it."""


def _blocks(task: Task, fitted: Fitted) -> Mergeable:
    """The blocks that a plan may merge the tokens of."""
    if task.recipe.merge == 1:
        return Mergeable(reason="the recipe says merge: 1")
    return mergeable(task.host, fitted.sites, FirstOf(task.fitting, 1))


def merged(task: Task, fitted: Fitted, point: Point) -> Point:
    """A plan with the merging that the recipe asks for.

    Raises:
        RecipeError: The model has no blocks for it, or a kernel of the plan takes no merged tokens.
    """
    assert task.recipe.merge is not None
    found = _blocks(task, fitted)
    if not found.blocks:
        raise RecipeError(f"merge: tokens of this model cannot be merged: {found.reason}. Leave merge out.")
    if strange := next((k.name for k in kernels_of(fitted, point).values() if not k.takes_merged), None):
        raise RecipeError(
            f"merge: kernel '{strange}' has no form for merged tokens. Set kernel to one that has ({some(_takers())}), "
            "or ratio to 0 to merge only."
        )
    point = replace(point, merges=schedule(found.blocks, task.recipe.merge))
    return _costed(task, fitted, point, drifts_of(task, fitted, [point], COUNTED_ON)[0].error)


def _takers() -> list[str]:
    """The kernels that take merged tokens."""
    return [name for name in kernel_names() if get_kernel(name).takes_merged]


def _costed(task: Task, fitted: Fitted, point: Point, error: float) -> Point:
    """A plan that merges, with its error and the FLOPs that it was seen to take."""
    share = merged_share(task.host, fitted.kernels, changes_of(fitted, point), FirstOf(task.fitting, 1))
    return replace(point, flops=share, error=error)


def with_taker(
    task: Task,
    fitted: Fitted,
    scores: Mapping[str, Sequence[Score]],
    progress: Progress = silent,
) -> tuple[Fitted, Mapping[str, Sequence[Score]]]:
    """For a target speed: fits and scores of ``TAKER``, too, at the first sites, if no kernel takes merged tokens."""
    if task.recipe.target_speedup is None or task.recipe.scorer == "paper":
        return fitted, scores
    blocks = _blocks(task, fitted).blocks
    sites = [site for site in fitted.eligible if task.host.block(site.name) in blocks]
    sites = sites[: ceil(FIRST * len(sites))]
    if any(kernel.takes_merged for site in sites for kernel in fitted.kernels[site.name]):
        return fitted, scores
    feed = FirstOf(task.fitting, COUNTED_ON)
    fits = calibrate(task.host, sites, [Candidate(kernel=TAKER)], feed, progress=progress)
    kernels = {name: [fit.kernel for fit in each if fit.kernel is not None] for name, each in fits.items()}
    sites = [site for site in sites if kernels[site.name]]
    more = isolated_scores(task.host, sites, kernels, feed, min_tokens=task.recipe.min_tokens, progress=progress)
    return (
        replace(fitted, fits={name: (*each, *fits.get(name, ())) for name, each in fitted.fits.items()}),
        {name: [*each, *more.get(name, ())] for name, each in scores.items()},
    )


def fast_enough(
    task: Task,
    fitted: Fitted,
    points: Sequence[Point],
    errors: Mapping[str, Sequence[float]],
    alone: Callable[[], Point],
) -> Point:
    """The plan that loses least among those that reach ``target_speedup``: with kernels, with merging, or with both.

    Every one is timed; of those that are fast enough the final outputs on calibration samples decide.

    Args:
        task: The task.
        fitted: The kernels of each site.
        points: Plans without merging, from the most faithful to the cheapest.
        errors: Error of each kernel of each site; infinite where it saves nothing.
        alone: Picks one of the points that is fast enough.

    Raises:
        GateError: No plan is.
    """
    target, refusal, fast = task.recipe.target_speedup, "", []
    assert target is not None
    try:
        fast.append(alone())
    except GateError as error:
        refusal = str(error)
    if blocks := _blocks(task, fitted).blocks:
        best = 1.0

        def speed(point: Point) -> float:
            nonlocal best
            reached = speed_of(task, fitted, point)
            best = max(best, reached)
            return reached

        for base in (Point({}, 1.0, 0.0), *_mixable(task, fitted, points, errors, blocks)):
            fast += _with_merging(base, blocks, speed, target)
        refusal += f" The fastest that merges tokens, too, reaches {best:.2f}."
    if not fast:
        raise GateError(refusal)
    drifts = drifts_of(task, fitted, fast, len(task.fitting))
    best = min(range(len(fast)), key=lambda index: drifts[index].error)
    chosen = fast[best]
    return _costed(task, fitted, chosen, drifts[best].error) if chosen.merges else chosen


def _with_merging(base: Point, blocks: Sequence[str], speed: Callable[[Point], float], target: float) -> list[Point]:
    """The lightest merging of each bend that makes a plan fast enough; none where its kernels make it slower."""
    whole = speed(base) if base.kernels else 1.0
    if whole < 1:
        return []
    clock = Clock(blocks, lambda shares: speed(replace(base, merges=shares)), whole)
    found = (lightest(clock, target, bend) for bend in BENDS)
    return [replace(base, merges=shares) for shares in found if shares is not None and min(shares.values()) < 1]


def _mixable(
    task: Task,
    fitted: Fitted,
    points: Sequence[Point],
    errors: Mapping[str, Sequence[float]],
    blocks: Sequence[str],
) -> list[Point]:
    """Plans whose kernels all take merged tokens: some of the frontier, or the first sites with ``TAKER``."""
    if any(get_kernel(candidate.kernel).takes_merged for candidate in task.candidates):
        mixable = [p for p in points if p.kernels and all(k.takes_merged for k in kernels_of(fitted, p).values())]
        return spaced(mixable, MIXED) if mixable else []
    first: dict[str, int] = {}
    for site, kernels in fitted.kernels.items():
        last = len(kernels) - 1
        if task.host.block(site) in blocks and kernels[last].takes_merged and errors[site][last] < float("inf"):
            first[site] = last
    return [Point(first, 1.0, 0.0)] if first else []
