"""Kernels by name; a kernel's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from latte_convert.errors import RecipeError, nearest
from latte_convert.kernels.base import Kernel

_KERNELS = {
    "elu": "EluKernel",
    "exact": "ExactKernel",
    "fitted": "FittedKernel",
    "latte": "LatteKernel",
    "monarch": "MonarchKernel",
    "near_far": "NearFarKernel",
    "performer": "PerformerKernel",
    "pola": "PolaKernel",
    "qt_vit": "QtVitKernel",
    "relu": "ReluKernel",
    "taylor2": "Taylor2Kernel",
}
"""Class of each kernel, in the module of the kernel's name."""


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
    kernel: type[Kernel] = getattr(import_module(f"latte_convert.kernels.{name}"), _KERNELS[name])
    return kernel
