"""What a plan on a frontier makes of a model, what that does to its final outputs, and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence

from latte_convert.adapters.convert import Changes, identity
from latte_convert.adapters.merging import merges_of
from latte_convert.calibration.fitted import Fitted
from latte_convert.data.feed import FirstOf
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.times import speedup
from latte_convert.selection.budget import Point
from latte_convert.selection.trials import Drift, try_plans
from latte_convert.task import Task


def changes_of(fitted: Fitted, point: Point) -> Changes:
    """What ``Host.convert`` makes a plan of."""
    return {**kernels_of(fitted, point), **merges_of(point.merges)}


def kernels_of(fitted: Fitted, point: Point) -> dict[str, Kernel]:
    """The kernels that a plan gives its sites."""
    kernels = fitted.kernels
    return {site: kernels[site][index] for site, index in point.kernels.items()}


def drifts_of(task: Task, fitted: Fitted, points: Sequence[Point], samples: int) -> list[Drift]:
    """What plans do to the final outputs on some calibration samples."""
    return try_plans(
        task.host,
        [changes_of(fitted, point) for point in points],
        FirstOf(task.fitting, samples),
        min_tokens=task.recipe.min_tokens,
        work=task.work,
    )


def speed_of(task: Task, fitted: Fitted, point: Point) -> float:
    """How many times faster than the original a plan is on one calibration sample, end to end."""
    first, changes, min_tokens = FirstOf(task.fitting, 1), changes_of(fitted, point), task.recipe.min_tokens

    def timed() -> float:
        return speedup(task.host, changes, first, min_tokens=min_tokens)

    # Kept, so that a run that is taken up again decides as it did.
    return task.work.once("speeds", [identity(changes), min_tokens, first.identities()], timed)
