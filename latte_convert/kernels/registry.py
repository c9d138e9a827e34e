"""Kernels by name."""

from __future__ import annotations

from latte_convert.errors import RecipeError, nearest
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.latte import LatteKernel

_KERNELS: dict[str, type[Kernel]] = {kernel.name: kernel for kernel in (ExactKernel, LatteKernel)}


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
    return _KERNELS[name]
