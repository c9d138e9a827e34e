"""Which site gets which kernel: scores, the frontier of plans, and the point of it that the recipe's budget picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from latte_convert.calibration.candidates import label
from latte_convert.data.feed import FirstOf
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.fidelity import speedup
from latte_convert.opening import Job
from latte_convert.progress import Progress, silent
from latte_convert.selection.budget import Point, SiteCost, choose, frontier, most_robust, spaced, that_save
from latte_convert.selection.costs import site_costs
from latte_convert.selection.greedy import greedy_order, path
from latte_convert.selection.isolated import isolated_scores
from latte_convert.selection.policy import count, plan
from latte_convert.selection.scores import Score, paper_scores
from latte_convert.selection.trials import Candidates, try_plans

COSTED_ON = 8
"""Calibration samples whose attention calls are counted."""
MARGIN = 0.8
"""Share of the loss that ``min_fidelity`` allows which a plan may use up on the calibration samples."""
SHOWN = 6
"""Plans of the frontier whose fidelity is measured for the report."""
SHOWN_ON = 4
"""Calibration samples that they are measured on."""


def choose_plan(job: Job, candidates: Candidates, progress: Progress = silent) -> None:
    """Score every site with every candidate and pick a plan; fills in ``scores``, ``plan``, ``frontier`` and ``fits``.

    Args:
        job: A job whose candidates are fitted.
        candidates: The fitted kernels of each eligible site, from the cheapest to the dearest.
        progress: Told of every step.

    Raises:
        RecipeError: The recipe asks for more sites than there are.
        GateError: No plan meets the budget.
    """
    with job.timed("score"):
        scores = _scores(job, candidates, progress)
    with job.timed("select"):
        costs = site_costs(
            job.model, job.adapter, candidates, FirstOf(job.fitting, COSTED_ON), min_tokens=job.recipe.min_tokens
        )
        errors = {site: [score.value for score in each] for site, each in scores.items()}
        if job.recipe.max_flops is not None or job.recipe.target_speedup is not None:
            errors = that_save(errors, costs)
        points, eligible = _weighed(job, candidates, errors, costs, progress)
        point = _pick(job, candidates, eligible)
        job.frontier = _measured(job, candidates, points, point)
    chosen = {site: point.kernels.get(site, _best(each)) for site, each in scores.items()}
    job.scores = {site: each[chosen[site]] for site, each in scores.items()}
    job.fits = {site: job.fitted[site][index] for site, index in chosen.items()}
    job.plan = plan(
        job.sites, {site: candidates[site][index].name for site, index in point.kernels.items()}, job.recipe
    )


def kernels_of(candidates: Candidates, point: Point) -> dict[str, Kernel]:
    """The kernels that a plan gives its sites."""
    return {site: candidates[site][index] for site, index in point.kernels.items()}


def _scores(job: Job, candidates: Candidates, progress: Progress) -> dict[str, list[Score]]:
    recipe = job.recipe
    if recipe.scorer == "paper":
        kernels = {site: each[0] for site, each in candidates.items()}
        scores = paper_scores(
            job.model,
            job.adapter,
            job.eligible,
            kernels,
            job.fitting,
            mse_weight=recipe.mse_weight,
            progress=progress,
        )
        return {site: [score] for site, score in scores.items()}
    return isolated_scores(
        job.model,
        job.adapter,
        job.eligible,
        candidates,
        job.fitting,
        min_tokens=recipe.min_tokens,
        progress=progress,
    )


def _weighed(
    job: Job,
    candidates: Candidates,
    errors: Mapping[str, Sequence[float]],
    costs: Mapping[str, SiteCost],
    progress: Progress,
) -> tuple[list[Point], list[Point]]:
    """Plans from the most faithful to the cheapest: all, and those that have the recipe's number of sites."""
    recipe = job.recipe
    wanted = count(job.sites, recipe)
    if recipe.scorer != "greedy":
        points = frontier(errors, costs)
        if wanted is None:
            return points, points
        # What costs exactly as much as softmax runs softmax at these lengths: no error, and nothing gained.
        real = {site for site, cost in costs.items() if any(flops != cost.exact for flops in cost.kernels)}
        first = real if recipe.scorer == "isolated" else ()
        return points, frontier(errors, costs, convert=most_robust(errors, wanted, first))
    several = any(len(each) > 1 for each in candidates.values())
    steps = greedy_order(
        job.model,
        job.adapter,
        candidates,
        errors,
        job.fitting,
        costs=costs if several or wanted is None else None,
        min_tokens=recipe.min_tokens,
        enough=lambda taken: wanted is not None and len({step.site for step in taken}) >= wanted,
        progress=progress,
    )
    points = path(steps, costs)
    if wanted is None:
        return points, points
    return points, [point for point in points if len(point.kernels) == wanted] or points[-1:]


def _pick(job: Job, candidates: Candidates, points: Sequence[Point]) -> Point:
    recipe = job.recipe
    if len(points) == 1 and count(job.sites, recipe) is not None:
        return points[0]  # nothing to choose: min_fidelity is a gate on the held-out samples
    least = recipe.min_fidelity
    if least is not None:  # what is held out mostly loses a little more than what a plan was chosen on
        least = 1 - MARGIN * (1 - least)
    return choose(
        points,
        measure=lambda point: _fidelities(job, candidates, [point], len(job.fitting))[0],
        speedup=lambda point: speedup(
            job.model, job.adapter, kernels_of(candidates, point), FirstOf(job.fitting, 1), min_tokens=recipe.min_tokens
        ),
        max_flops=recipe.max_flops,
        target_speedup=recipe.target_speedup,
        min_fidelity=least,
        label=lambda site, index: label(candidates[site][index], job.candidates),
    )


def _measured(job: Job, candidates: Candidates, points: Sequence[Point], chosen: Point) -> list[tuple[Point, bool]]:
    """Some plans of the frontier with their fidelity, for the report; the chosen one is among them."""
    shown = [point for point in spaced(points, SHOWN) if point.kernels and point.kernels != chosen.kernels] + [chosen]
    shown.sort(key=lambda point: -point.flops)
    cosines = _fidelities(job, candidates, shown, SHOWN_ON)
    return [(replace(point, cosine=cosine), point is chosen) for point, cosine in zip(shown, cosines, strict=True)]


def _fidelities(job: Job, candidates: Candidates, points: Sequence[Point], samples: int) -> list[float]:
    """Cosine of the final output of plans on some calibration samples."""
    drifts = try_plans(
        job.model,
        job.adapter,
        [kernels_of(candidates, point) for point in points],
        FirstOf(job.fitting, samples),
        min_tokens=job.recipe.min_tokens,
    )
    return [drift.worst.cosine for drift in drifts]


def _best(scores: Sequence[Score]) -> int:
    """Index of the most faithful kernel."""
    return min(range(len(scores)), key=lambda index: scores[index].value)
