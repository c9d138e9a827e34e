"""Arithmetic of one attention call: by the source paper's counting, and truly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from latte_convert import compat
from latte_convert.attention import CallShape
from latte_convert.kernels.base import Kernel


@dataclass(frozen=True)
class Flops:
    """Operations of one attention layer on one sample, projections not included.

    Attributes:
        paper: The source paper's counting: softmax ``N²·D``, LATTE ``N·H·(d+1)²``, anything else a quarter of
            ``true``, which is what the paper's figures amount to. Comparable with each other only.
        true: Every matmul that runs, 2 per multiply-add. Elementwise work is left out.
    """

    paper: int
    true: int


def attention_flops(kernel: Kernel, shape: CallShape) -> Flops:
    """Count the operations of one attention call.

    The paper's formulas know self-attention with equal head sizes. Where the shapes differ they are read
    as: softmax ``Nq·Nk·H·d``; LATTE the mean of ``Nq`` and ``Nk``, and ``(d+1)·(dv+1)``. They ignore causality.
    """
    true = kernel.flops(shape)
    s = shape
    if kernel.name == "exact":
        return Flops(paper=s.queries * s.keys * s.heads * s.head_dim, true=true)
    if kernel.name == "latte":
        return Flops(paper=(s.queries + s.keys) * s.heads * (s.head_dim + 1) * (s.value_dim + 1) // 2, true=true)
    return Flops(paper=true // 4, true=true)


def measured_flops(call: Callable[[], Any]) -> tuple[int, str]:
    """Count the FLOPs of what runs with ``torch.utils.flop_counter``.

    Returns:
        The count, and which backend ran ``scaled_dot_product_attention``: ``flash``, ``efficient``, ``cudnn``, or
        ``math`` for plain matrix products. PyTorch's counter does not know the CPU's flash attention; it is counted
        by PyTorch's own formula for the others.
    """
    flash = compat.CPU_ATTENTION.get()
    with FlopCounterMode(display=False, custom_mapping={} if flash is None else {flash: _sdpa}) as counter:
        call()
    operators = " ".join(str(operator) for operator in counter.get_flop_counts().get("Global", {}))
    backend = next((name for name in ("flash", "efficient", "cudnn") if f"_{name}_attention" in operators), "math")
    return counter.get_total_flops(), backend


def _sdpa(query: Any, key: Any, value: Any, *_args: Any, out_shape: Any = None, **_kwargs: Any) -> int:
    """Both matmuls; what the counter gives are shapes, ``(B, H, N, d)``."""
    batch, heads, queries, width = query
    return 2 * int(batch * heads * queries * key[2]) * int(width + value[3])
