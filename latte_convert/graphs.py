"""What differs while a graph of a model is made instead of a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from latte_convert import compat

if TYPE_CHECKING:
    from torch import Tensor


exporting: Callable[[], bool] = compat.EXPORTING.get() or (lambda: False)
"""Whether a graph is being made that is to serve other inputs too: no loop may depend on their number."""


def plain(size: int) -> int:
    """A size as a number: ``torch.jit.trace`` makes tensors of sizes, and would warn that it keeps them as they are."""
    jit: Any = torch.jit
    if not jit.is_tracing():
        return size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jit.TracerWarning)
        return int(size)


def sizes(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor in numbers, see ``plain``."""
    return tuple(map(plain, tensor.shape))


def recorded(tensor: Tensor | None = None) -> bool:
    """Whether somebody keeps what is computed, now or from a tensor, so that nothing may be written in place.

    That is autograd; and ``torch.jit.trace``, which checks a trace by another one without gradients.
    """
    jit: Any = torch.jit
    grad = torch.is_grad_enabled() if tensor is None else tensor.requires_grad
    return grad or bool(jit.is_tracing())


def in_one_graph() -> bool:
    """Whether a graph is made that no Python runs beside: exported, or traced by ``torch.jit``."""
    jit: Any = torch.jit
    return exporting() or bool(jit.is_tracing())
