"""Kernels by name; a kernel's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from latte_convert.errors import RecipeError, nearest
from latte_convert.kernels.base import Kernel

_KERNELS = {
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


def kernel_names() -> tuple[str, ...]:
    """Names that ``get_kernel`` accepts, sorted."""
    return tuple(sorted(_KERNELS))


def get_kernel(name: str) -> type[Kernel]:
    """Kernel class called ``name``.

    Raises:
        RecipeError: Where there is no such kernel.
    """
    if name not in _KERNELS:
        raise RecipeError(
            f"unknown kernel {name!r} ({nearest(name, kernel_names())}): set `kernel` in the recipe to one that exists"
        )
    module, _, cls = _KERNELS[name].partition(":")
    kernel: type[Kernel] = getattr(import_module(f"latte_convert.kernels.{module}"), cls)
    return kernel
