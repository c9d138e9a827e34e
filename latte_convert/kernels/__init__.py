"""Sub-quadratic attention operators: one family per file, one signature, one registry."""

from __future__ import annotations

from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel, kernel_names

__all__ = ["Kernel", "get_kernel", "kernel_names"]
