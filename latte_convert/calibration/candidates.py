"""From a recipe to the kernels that are fitted to every site."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from latte_convert.errors import RecipeError, UsageError, nearest
from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.recipe import Candidate, Recipe

AUTO = (
    Candidate(kernel="near_far", options={"clusters": 32}),
    Candidate(kernel="near_far", options={"clusters": 64}),
    Candidate(kernel="near_far", options={"clusters": 128}),
    Candidate(kernel="near_far", options={"clusters": 256}),
)
"""What ``kernel: auto`` chooses from: the frontier of fidelity and cost in scripts/compare_kernels.py."""

_SETTINGS = ("granularity", "tte", "jpn")


def candidates(recipe: Recipe) -> list[Candidate]:
    """The kernels of a recipe with all their options, checked by building each.

    Raises:
        RecipeError: A kernel does not exist, or an option does not fit it.
    """
    wanted: tuple[Candidate, ...] = (Candidate(kernel=recipe.kernel, options=recipe.options),)
    if recipe.kernel == "auto":
        wanted = tuple(
            Candidate(kernel=each.kernel, options={**each.options, **recipe.options})
            for each in recipe.candidates or AUTO
        )
    return [_resolved(each, recipe) for each in wanted]


def label(kernel: Kernel, offered: Sequence[Candidate]) -> str:
    """Name of a kernel, with the options that tell it from others of its name: ``near_far (clusters 64)``."""
    options = [each.options for each in offered if each.kernel == kernel.name]
    names = sorted({name for each in options for name in each if len({repr(o.get(name)) for o in options}) > 1})
    shown = ", ".join(f"{name} {kernel.options.get(name)}" for name in names)
    return f"{kernel.name} ({shown})" if shown else kernel.name


def _resolved(candidate: Candidate, recipe: Recipe) -> Candidate:
    kernel = get_kernel(candidate.kernel)
    extras = {name: value for name in Extras.__annotations__ if (value := getattr(recipe, name)) is not None}
    known = set(inspect.signature(kernel).parameters) - {"heads", "head_dim", "extras"}
    settings = {name: getattr(recipe, name) for name in _SETTINGS if name in known}
    options: dict[str, Any] = {**kernel.recommended, **extras, **settings, **candidate.options}
    unknown = sorted(set(options) - known - set(Extras.__annotations__))
    if unknown:
        choices = sorted(known | set(Extras.__annotations__))
        raise RecipeError(f"kernel '{kernel.name}' has no option '{unknown[0]}' ({nearest(unknown[0], choices)})")
    try:
        kernel(1, 8, **options)
    except (TypeError, ValueError, UsageError) as error:
        raise RecipeError(f"options of kernel '{kernel.name}': {error}") from None
    # Not the options of what was built: defaults may depend on the number of channels.
    return Candidate(kernel=kernel.name, options=options)
