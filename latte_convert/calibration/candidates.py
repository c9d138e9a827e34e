"""From a recipe to the kernels that are fitted to every site."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from latte_convert.errors import RecipeError, UsageError, first_line, nearest
from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.recipe import Candidate, Recipe

AUTO = (
    Candidate(kernel="latte"),
    Candidate(kernel="near_far", options={"window": 4, "halo": 1, "clusters": 32, "steps": 2}),
    Candidate(kernel="near_far", options={"window": 4, "halo": 2, "clusters": 64, "steps": 2}),
    Candidate(kernel="near_far", options={"window": 8, "halo": 2, "clusters": 128, "steps": 2}),
    Candidate(kernel="near_far", options={"window": 8, "halo": 2, "clusters": 256, "steps": 2, "views": 8}),
)
"""What ``kernel: auto`` chooses from, from cheap to faithful; latte is the only one for causal sites."""

_SETTINGS = ("granularity", "tte", "jpn")


def candidates(recipe: Recipe) -> list[Candidate]:
    """The kernels of a recipe with all their options, checked by building each.

    Raises:
        RecipeError: A kernel does not exist, or an option does not fit it.
    """
    wanted = recipe.candidates or AUTO if recipe.kernel == "auto" else (Candidate(kernel=recipe.kernel),)
    for each in wanted:
        if each.kernel == "exact":
            raise RecipeError("kernel 'exact' is what the model has already: choose another, or leave sites out.")
    return [_resolved(each, recipe) for each in _with_options(wanted, recipe.options)]


def _with_options(wanted: Sequence[Candidate], options: Mapping[str, Any]) -> list[Candidate]:
    """Candidates with the recipe's options: of several, each gets those that some of them have and it has, too."""
    known = {each.kernel: _options_of(get_kernel(each.kernel)) for each in wanted}
    anywhere = set().union(*known.values())

    def taken(kernel: str) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name in known[kernel] or name not in anywhere}

    return [Candidate(kernel=each.kernel, options={**each.options, **taken(each.kernel)}) for each in wanted]


def _options_of(kernel: type[Kernel]) -> set[str]:
    """Names of the options that a kernel takes."""
    own = set(inspect.signature(kernel).parameters) - {"heads", "head_dim", "extras"}
    return own | set(Extras.__annotations__)


def label(kernel: Kernel, offered: Sequence[Candidate]) -> str:
    """Name of a kernel, with the options that tell it from others of its name: ``near_far (clusters 64)``."""
    options = [each.options for each in offered if each.kernel == kernel.name]
    names = sorted({name for each in options for name in each if len({repr(o.get(name)) for o in options}) > 1})
    shown = ", ".join(f"{name} {kernel.options.get(name)}" for name in names)
    return f"{kernel.name} ({shown})" if shown else kernel.name


def _resolved(candidate: Candidate, recipe: Recipe) -> Candidate:
    kernel = get_kernel(candidate.kernel)
    extras = {name: value for name in Extras.__annotations__ if (value := getattr(recipe, name)) is not None}
    known = _options_of(kernel)
    settings = {name: getattr(recipe, name) for name in _SETTINGS if name in known}
    options: dict[str, Any] = {**kernel.recommended, **extras, **settings, **candidate.options}
    unknown = sorted(set(options) - known)
    if unknown:
        choices = sorted(known)
        raise RecipeError(f"kernel '{kernel.name}' has no option '{unknown[0]}' ({nearest(unknown[0], choices)})")
    _check_types(kernel, options)
    try:
        kernel(1, 8, **options)
    except (TypeError, ValueError, UsageError) as error:
        raise RecipeError(f"options of kernel '{kernel.name}': {error}") from None
    except RuntimeError as error:  # PyTorch's, where a tensor of that size cannot be had
        raise RecipeError(f"options of kernel '{kernel.name}': {first_line(error)}") from None
    # Not the options of what was built: defaults may depend on the number of channels.
    return Candidate(kernel=kernel.name, options=options)


def _check_types(kernel: type[Kernel], options: Mapping[str, Any]) -> None:
    """Refuse values that a constructor would misread: any word is true, and true is 1.

    Raises:
        RecipeError: An option is of another type than the kernel declares.
    """
    types = get_type_hints(Extras) | get_type_hints(kernel.__init__)
    for name, value in options.items():
        try:
            TypeAdapter(types[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:  # noqa: PERF203
            reason = error.errors()[0]["msg"].replace("Input should", "it should")
            raise RecipeError(f"option '{name}' of kernel '{kernel.name}' is {value!r}: {reason}.") from None
