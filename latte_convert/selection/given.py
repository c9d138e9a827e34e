"""A plan that is given: its sites are fitted, and nothing is scored or chosen."""

from __future__ import annotations

from collections.abc import Mapping

from latte_convert.calibration.fit import Fit
from latte_convert.calibration.fitted import Fitted
from latte_convert.calibration.pipeline import calibrate
from latte_convert.errors import CheckpointError, RecipeError
from latte_convert.progress import Progress, silent
from latte_convert.recipe import Candidate
from latte_convert.selection.budget import Point
from latte_convert.selection.choice import Choice
from latte_convert.selection.policy import plan
from latte_convert.task import Task


def fit_given(
    task: Task, kernels: Mapping[str, Candidate], merges: Mapping[str, float], progress: Progress = silent
) -> tuple[Fitted, Choice]:
    """Fit the kernels of a plan.

    Args:
        task: Its eligible sites are those of the plan.
        kernels: The kernel of each of them.
        merges: Share of its tokens that each merged block works on.
        progress: Told of every sample.

    Raises:
        CheckpointError: A site cannot be fitted.
        RecipeError: The model has no such block to merge.
    """
    blocks = dict(task.host.model.named_modules())
    if lost_block := next((name for name in merges if name not in blocks), None):
        raise RecipeError(f"this model has no block '{lost_block}' whose tokens could be merged.")
    fits: dict[str, list[Fit]] = {}
    for candidate in {repr(each): each for each in kernels.values()}.values():
        sites = [site for site in task.sites if kernels.get(site.name) == candidate]
        feed, seed = task.fitting, task.recipe.seed
        fits |= calibrate(task.host, sites, [candidate], feed, seed=seed, work=task.work, progress=progress)
    fitted = Fitted.of(task.sites, fits)
    if lost := [site for site in fitted.sites if site.name in kernels and not site.eligible]:
        raise CheckpointError(f"{lost[0].name} cannot be fitted: {lost[0].reason}.")
    point = Point(dict.fromkeys(fitted.fits, 0), 1.0, 0.0, merges=merges)
    names = {name: candidate.kernel for name, candidate in kernels.items()}
    chosen = {name: each[0] for name, each in fitted.fits.items()}
    return fitted, Choice(plan(fitted.sites, names, task.recipe, merges), chosen, {}, (), point)
