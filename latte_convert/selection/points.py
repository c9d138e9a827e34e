"""What a plan on a frontier makes of a model, and what that does to its final outputs."""

from __future__ import annotations

from collections.abc import Sequence

from latte_convert.adapters.convert import Changes
from latte_convert.adapters.merging import merges_of
from latte_convert.calibration.fitted import Fitted
from latte_convert.data.feed import FirstOf
from latte_convert.kernels.base import Kernel
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
    )
