"""Which site gets which kernel: scores, the frontier of plans, and the point of it that the recipe's budget picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from latte_convert.adapters.convert import Changes
from latte_convert.adapters.merging import merges_of
from latte_convert.calibration.fit import Fit
from latte_convert.calibration.fitted import Fitted
from latte_convert.data.feed import FirstOf
from latte_convert.kernels.base import Kernel
from latte_convert.progress import Progress, silent
from latte_convert.recipe import BUDGETS, Recipe
from latte_convert.selection.budget import (
    Point,
    SiteCost,
    choose,
    frontier,
    most_robust,
    spaced,
    that_save,
    that_work,
)
from latte_convert.selection.costs import site_costs
from latte_convert.selection.fast import fast_enough, merged
from latte_convert.selection.greedy import greedy_order, path
from latte_convert.selection.isolated import isolated_scores
from latte_convert.selection.plan import Plan
from latte_convert.selection.points import drifts_of, speed_of
from latte_convert.selection.policy import count, plan
from latte_convert.selection.scores import Score, paper_scores
from latte_convert.task import Task

COSTED_ON = 8
"""Calibration samples whose attention calls are counted."""
MARGIN = 0.8
"""Share of the loss that ``min_fidelity`` allows which a plan may use up on the calibration samples."""
RUINOUS = 0.1
"""A site whose conversion alone changes the final output by more than this share of its variance is converted only
where it is asked for, and never without a warning."""
SHOWN = 6
"""Plans of the frontier whose fidelity is measured for the report."""
SHOWN_ON = 4
"""Calibration samples that they are measured on."""

Scores = Mapping[str, Sequence[Score]]
"""The score of each kernel of each eligible site, by site."""


@dataclass(frozen=True)
class Choice:
    """What becomes of every site.

    Attributes:
        plan: What becomes what.
        fits: The fit that each eligible site gets, or would get.
        scores: The score of that fit.
        frontier: Plans that were weighed, from the most faithful to the cheapest.
        chosen: The one of them that the plan is.
    """

    plan: Plan
    fits: Mapping[str, Fit]
    scores: Mapping[str, Score]
    frontier: tuple[Point, ...]
    chosen: Point

    @property
    def changes(self) -> Changes:
        """The kernels, and the blocks whose tokens are merged: what ``Host.convert`` takes."""
        return {**self.kernels, **merges_of(self.plan.merges)}

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernel of each site to convert, in order of the module tree."""
        kernels = {site.name: self.fits[site.name].kernel for site in self.plan.converted}
        return {name: kernel for name, kernel in kernels.items() if kernel is not None}


def score_sites(task: Task, fitted: Fitted, progress: Progress = silent) -> Scores:
    """How much each kernel of each site changes the model, by the recipe's scorer; low is robust."""
    recipe = task.recipe
    if recipe.scorer == "paper":
        scores = paper_scores(
            task.host,
            fitted.eligible,
            {site: each[0] for site, each in fitted.kernels.items()},
            task.scoring,
            mse_weight=recipe.mse_weight,
            work=task.work,
            progress=progress,
        )
        return {site: [score] for site, score in scores.items()}
    return isolated_scores(
        task.host,
        fitted.eligible,
        fitted.kernels,
        task.scoring,
        min_tokens=recipe.min_tokens,
        work=task.work,
        progress=progress,
    )


def choose_plan(
    task: Task, fitted: Fitted, scores: Scores, progress: Progress = silent, *, margin: float = MARGIN
) -> Choice:
    """Pick the plan that keeps the recipe's budget and loses least.

    Args:
        task: The task.
        fitted: The kernels of each site.
        scores: How much each of them changes the model.
        progress: Told of every step.
        margin: Share of the loss that ``min_fidelity`` allows which the plan may use up on the calibration samples.

    Raises:
        RecipeError: The recipe asks for more sites than there are.
        GateError: No plan meets the budget.
    """
    recipe, kernels = task.recipe, fitted.kernels
    costed = FirstOf(task.fitting, COSTED_ON)
    costs = site_costs(task.host, kernels, costed, min_tokens=recipe.min_tokens, work=task.work)
    errors = {site: [score.value for score in each] for site, each in scores.items()}
    if recipe.scorer != "paper":
        errors = _worth_it(that_work(errors, costs), recipe)
    if recipe.max_flops is not None or recipe.target_speedup is not None:
        errors = that_save(errors, costs)
    points, eligible = _weighed(task, fitted, errors, costs, progress)
    if recipe.target_speedup is None:
        point = _pick(task, fitted, eligible, margin)
    else:
        point, *slower = fast_enough(task, fitted, errors, costs, lambda: _pick(task, fitted, eligible, margin))
        points = slower if point.merges else points
    if recipe.merge is not None and recipe.merge < 1 and not point.merges:
        point = merged(task, fitted, point)
    best = {site: point.kernels.get(site, _best(each)) for site, each in scores.items()}
    shown = _measured(task, fitted, points, point)
    return Choice(
        plan=plan(
            fitted.sites,
            {site: kernels[site][index].name for site, index in point.kernels.items()},
            recipe,
            point.merges,
        ),
        fits={site: fitted.fits[site][index] for site, index in best.items()},
        scores={site: scores[site][index] for site, index in best.items()},
        frontier=shown,
        chosen=next(each for each in shown if _same(each, point)),
    )


def _weighed(
    task: Task,
    fitted: Fitted,
    errors: Mapping[str, Sequence[float]],
    costs: Mapping[str, SiteCost],
    progress: Progress,
) -> tuple[Sequence[Point], Sequence[Point]]:
    """Plans from the most faithful to the cheapest: all, and those that have the recipe's number of sites."""
    recipe = task.recipe
    wanted = count(fitted.sites, recipe)
    if recipe.scorer != "greedy":
        points = frontier(errors, costs)
        if wanted is None:
            return points, points
        return points, frontier(errors, costs, convert=most_robust(errors, wanted))
    several = any(len(each) > 1 for each in fitted.fits.values())
    steps = greedy_order(
        task.host,
        fitted.kernels,
        errors,
        task.scoring,
        costs=costs if several or wanted is None else None,
        min_tokens=recipe.min_tokens,
        work=task.work,
        enough=lambda taken: wanted is not None and len({step.site for step in taken}) >= wanted,
        progress=progress,
    )
    points = path(steps, costs)
    if wanted is None:
        return points, points
    return points, [point for point in points if len(point.kernels) == wanted] or points[-1:]


def _worth_it(errors: dict[str, list[float]], recipe: Recipe) -> dict[str, list[float]]:
    """The errors that plans may have: by default without sites that ruin the model, as long as others are left."""
    bearable = {site: [error if error <= RUINOUS else float("inf") for error in each] for site, each in errors.items()}
    asked = any(getattr(recipe, name) is not None for name in BUDGETS)
    left = any(error < float("inf") for each in bearable.values() for error in each)
    return errors if asked or not left else bearable


def _pick(task: Task, fitted: Fitted, points: Sequence[Point], margin: float) -> Point:
    recipe = task.recipe
    if len(points) == 1 and count(fitted.sites, recipe) is not None:
        return points[0]  # nothing to choose: min_fidelity is a gate on the held-out samples
    least = recipe.min_fidelity
    if least is not None:  # what is held out mostly loses a little more than what a plan was chosen on
        least = 1 - margin * (1 - least)
    return choose(
        points,
        measure=lambda point: drifts_of(task, fitted, [point], len(task.fitting))[0].worst.likeness,
        speedup=lambda point: speed_of(task, fitted, point),
        max_flops=recipe.max_flops,
        target_speedup=recipe.target_speedup,
        min_fidelity=least,
        label=lambda site, index: task.label(fitted.kernels[site][index]),
    )


def _measured(task: Task, fitted: Fitted, points: Sequence[Point], chosen: Point) -> tuple[Point, ...]:
    """Some plans of the frontier with their fidelity, for the report; the chosen one is among them."""
    some = spaced(points, SHOWN) if points else []
    shown = [point for point in some if (point.kernels or point.merges) and not _same(point, chosen)] + [chosen]
    shown.sort(key=lambda point: -point.flops)
    if all(point.cosine is not None for point in shown):
        return tuple(shown)  # those that a speed was found with
    drifts = drifts_of(task, fitted, shown, SHOWN_ON)
    return tuple(
        replace(point, cosine=drift.least_cosine.cosine, likeness=drift.worst.likeness)
        for point, drift in zip(shown, drifts, strict=True)
    )


def _same(one: Point, other: Point) -> bool:
    """Whether two plans do the same."""
    return one.kernels == other.kernels and one.merges == other.merges


def _best(scores: Sequence[Score]) -> int:
    """Index of the most faithful kernel."""
    return min(range(len(scores)), key=lambda index: scores[index].value)
