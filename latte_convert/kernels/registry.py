"""Kernels by name; see ``Registry``."""

from __future__ import annotations

from typing import TypeVar

from latte_convert.errors import RecipeError
from latte_convert.kernels.base import Kernel
from latte_convert.registry import Registry

_OURS = {
    "blocks": "blocks.kernel:BlocksKernel",
    "elu": "rivals.elu:EluKernel",
    "exact": "exact:ExactKernel",
    "fitted": "rivals.fitted:FittedKernel",
    "latte": "latte.kernel:LatteKernel",
    "monarch": "rivals.monarch:MonarchKernel",
    "near_far": "near_far.kernel:NearFarKernel",
    "near_past": "near_far.causal:NearPastKernel",
    "performer": "rivals.performer:PerformerKernel",
    "pola": "rivals.pola:PolaKernel",
    "qt_vit": "rivals.qt_vit:QtVitKernel",
    "relu": "rivals.relu:ReluKernel",
    "taylor2": "rivals.taylor2:Taylor2Kernel",
}

KERNELS = Registry(
    "kernel",
    "latte_convert.kernels.base:Kernel",
    "latte_convert.kernels",
    {name: f"latte_convert.kernels.{where}" for name, where in _OURS.items()},
    RecipeError,
    "set `kernel` to one that exists, install the package that offers it, or import the module that registers it",
)

K = TypeVar("K", bound=type[Kernel])


def register_kernel(kernel: K) -> K:
    """Make a kernel known under its ``name`` in this process; a decorator of its class.

    Registering a class of the same module and name again replaces the earlier one, as a notebook does.

    Raises:
        UsageError: It is no kernel, has no name, or its name is taken.
    """
    KERNELS.register(kernel)
    return kernel


def kernel_names() -> tuple[str, ...]:
    """Names that ``get_kernel`` accepts, sorted."""
    return KERNELS.names()


def get_kernel(name: str) -> type[Kernel]:
    """Kernel class called ``name``.

    Raises:
        RecipeError: There is no such kernel, or the package that offers it cannot be used.
    """
    kernel: type[Kernel] = KERNELS.get(name)
    return kernel
