"""Plans made of measured time: kernels, merging, or both, whichever loses least at the speed that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from latte_convert.calibration.fitted import Fitted
from latte_convert.data.feed import FirstOf
from latte_convert.errors import GateError, RecipeError
from latte_convert.kernels.registry import get_kernel, kernel_names
from latte_convert.measuring.fidelity import Speeds
from latte_convert.selection.budget import Point, spaced
from latte_convert.selection.costs import merged_share
from latte_convert.selection.merging import BENDS, Mergeable, lightest, mergeable, schedule
from latte_convert.selection.points import changes_of, drifts_of, kernels_of
from latte_convert.task import Task
from latte_convert.wording import some

COUNTED_ON = 4
"""Calibration samples that the error of a plan that merges is measured on."""
MIXED = 2
"""Plans of the frontier that are tried together with merging."""


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


def fast_enough(task: Task, fitted: Fitted, points: Sequence[Point], alone: Callable[[], Point]) -> Point:
    """The plan that loses least among those that reach ``target_speedup``: with kernels, with merging, or with both.

    Every one is timed; of those that are fast enough the final outputs on the calibration samples decide.

    Args:
        task: The task.
        fitted: The kernels of each site.
        points: Plans without merging, from the most faithful to the cheapest.
        alone: Picks one of them that is fast enough.

    Raises:
        GateError: No plan is.
    """
    target, refusal, fast = task.recipe.target_speedup, "", []
    assert target is not None
    try:
        fast.append(alone())
    except GateError as error:
        refusal = str(error)
    found = _blocks(task, fitted)
    if found.blocks:
        speeds = Speeds(task.host, FirstOf(task.fitting, 1), min_tokens=task.recipe.min_tokens)
        bases = [Point({}, 1.0, 0.0), *_mixable(fitted, points)]
        fast += [plan for base in bases for plan in _with_merging(fitted, base, found.blocks, speeds, target)]
        refusal += f" The fastest that merges tokens, too, reaches {speeds.best:.2f}."
    if not fast:
        raise GateError(refusal)
    drifts = drifts_of(task, fitted, fast, len(task.fitting))
    best = min(range(len(fast)), key=lambda index: drifts[index].error)
    chosen = fast[best]
    return _costed(task, fitted, chosen, drifts[best].error) if chosen.merges else chosen


def _with_merging(fitted: Fitted, base: Point, blocks: Sequence[str], speeds: Speeds, target: float) -> list[Point]:
    """The lightest merging of each bend that makes a plan fast enough."""

    def speed(shares: Mapping[str, float]) -> float:
        return speeds.of(changes_of(fitted, replace(base, merges=shares)))

    found = (lightest(blocks, speed, target, bend) for bend in BENDS)
    return [replace(base, merges=shares) for shares in found if shares is not None]


def _mixable(fitted: Fitted, points: Sequence[Point]) -> list[Point]:
    """Some plans whose kernels all take merged tokens."""
    mixable = [p for p in points if p.kernels and all(k.takes_merged for k in kernels_of(fitted, p).values())]
    return spaced(mixable, MIXED) if mixable else []
