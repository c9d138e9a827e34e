"""Attention operators: one kernel a file with its options, its fit and its cost; one call, one registry."""

from __future__ import annotations

from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.registry import get_kernel, kernel_names, register_kernel

__all__ = ["Extras", "Kernel", "get_kernel", "kernel_names", "register_kernel"]
