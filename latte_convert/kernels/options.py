"""The options of a kernel: the keyword arguments that its constructor declares, checked before anything is fitted."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from latte_convert.errors import RecipeError, UsageError, first_line, nearest
from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.registry import get_kernel, kernel_names

_OF_THE_SITE = ("heads", "head_dim", "value_dim", "extras")
"""What a constructor takes besides options: the widths of the site it is for."""


def options_of(kernel: type[Kernel]) -> dict[str, Any]:
    """Type of every option that a kernel takes, by name."""
    types = get_type_hints(kernel.__init__)
    own = [name for name in inspect.signature(kernel).parameters if name not in _OF_THE_SITE]
    return {name: types[name] for name in own} | get_type_hints(Extras)


def kernels_with(option: str) -> list[str]:
    """Names of the kernels that have an option."""
    return [name for name in kernel_names() if option in options_of(get_kernel(name))]


def resolve_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a kernel with those that it recommends; what is in neither has the constructor's default.

    Args:
        name: Name of the kernel.
        given: Options, which win over the recommended ones.

    Raises:
        RecipeError: There is no such kernel, it is what the model has already, or an option does not fit it.
    """
    if name == "exact":
        raise RecipeError("kernel 'exact' is what the model has already: choose another, or leave sites out.")
    kernel = get_kernel(name)
    types = options_of(kernel)
    options = {**kernel.recommended, **given}
    for option, value in options.items():
        if option not in types:
            raise RecipeError(f"kernel '{name}' has no option '{option}' ({nearest(option, sorted(types))})")
        _check_type(name, option, value, types[option])
    try:
        kernel(1, 8, **options)
    except (TypeError, ValueError, UsageError, RuntimeError) as error:  # RuntimeError: PyTorch cannot have that size
        raise RecipeError(f"options of kernel '{name}': {first_line(error)}") from None
    # Not the options of what was built: defaults may depend on the number of channels.
    return options


def _check_type(kernel: str, option: str, value: Any, wanted: Any) -> None:
    """Refuse a value that a constructor would misread: any word is true, and true is 1.

    Raises:
        RecipeError: The option is of another type than the kernel declares.
    """
    try:
        TypeAdapter(wanted, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should", "it should")
        raise RecipeError(f"option '{option}' of kernel '{kernel}' is {value!r}: {reason}.") from None
