"""Kernels by name: those of this package, those that were registered, and those that installed packages offer.

A kernel's module is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from latte_convert.errors import RecipeError, UsageError, first_line, nearest
from latte_convert.kernels.base import Kernel

GROUP = "latte_convert.kernels"
"""Entry points of other packages: the name of a kernel, and ``module:Class``."""

_OURS = {
    "elu": "rivals.elu:EluKernel",
    "exact": "exact:ExactKernel",
    "fitted": "rivals.fitted:FittedKernel",
    "latte": "latte.kernel:LatteKernel",
    "monarch": "rivals.monarch:MonarchKernel",
    "near_far": "near_far.kernel:NearFarKernel",
    "performer": "rivals.performer:PerformerKernel",
    "pola": "rivals.pola:PolaKernel",
    "qt_vit": "rivals.qt_vit:QtVitKernel",
    "relu": "rivals.relu:ReluKernel",
    "taylor2": "rivals.taylor2:Taylor2Kernel",
}
"""Where the class of each kernel is."""

_registered: dict[str, type[Kernel]] = {}

K = TypeVar("K", bound=type[Kernel])


def register_kernel(kernel: K) -> K:
    """Make a kernel known under its ``name`` in this process; a decorator of its class.

    Registering a class of the same module and name again replaces the earlier one, as a notebook does.

    Raises:
        UsageError: It is no kernel, has no name, or its name is taken.
    """
    name = getattr(kernel, "name", None)
    if not (isinstance(kernel, type) and issubclass(kernel, Kernel) and isinstance(name, str) and name):
        raise UsageError(f"{kernel!r} cannot be registered: give a subclass of Kernel with a `name`")
    known = _registered.get(name)
    again = known is not None and (known.__module__, known.__qualname__) == (kernel.__module__, kernel.__qualname__)
    if name in _OURS or name in _offered() or (known is not None and not again):
        raise UsageError(f"there is a kernel named '{name}' already: give {kernel.__qualname__} another `name`")
    _registered[name] = kernel
    return kernel


def kernel_names() -> tuple[str, ...]:
    """Names that ``get_kernel`` accepts, sorted."""
    return tuple(sorted({*_OURS, *_registered, *_offered()}))


def get_kernel(name: str) -> type[Kernel]:
    """Kernel class called ``name``.

    Raises:
        RecipeError: There is no such kernel, or the package that offers it cannot be used.
    """
    if name in _OURS:
        module, _, cls = _OURS[name].partition(":")
        kernel: type[Kernel] = getattr(import_module(f"latte_convert.kernels.{module}"), cls)
        return kernel
    if name in _registered:
        return _registered[name]
    if (point := _offered().get(name)) is not None:
        return _load(point)
    raise RecipeError(
        f"unknown kernel {name!r} ({nearest(name, kernel_names())}): set `kernel` to one that exists, install the "
        "package that offers it, or import the module that registers it"
    )


def _offered() -> dict[str, EntryPoint]:
    """What installed packages offer, by name; a name of ours is ours."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OURS}


def _load(point: EntryPoint) -> type[Kernel]:
    """The class behind an entry point.

    Raises:
        RecipeError: It cannot be imported, or is no kernel of that name.
    """
    package = point.dist.name if point.dist is not None else point.value
    try:
        kernel = point.load()
    except Exception as error:  # code of others: whatever it raises
        raise RecipeError(
            f"kernel '{point.name}' of package {package} cannot be imported: {first_line(error)}. Repair or remove it."
        ) from error
    if not (isinstance(kernel, type) and issubclass(kernel, Kernel)) or kernel.name != point.name:
        raise RecipeError(f"{point.value} of package {package} is no kernel named '{point.name}': repair or remove it.")
    return kernel
