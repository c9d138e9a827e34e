"""Arithmetic of one attention call, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallShape:
    """What a kernel's FLOPs depend on; one sample.

    Attributes:
        queries: Number of query tokens, Nq.
        keys: Number of key tokens, Nk.
        heads: Number of heads, H.
        head_dim: Channels per head of query and key, d.
        value_dim: Channels per head of value, dv.
        causal: Whether a query sees only the keys up to its own position.
        prefix: Number of leading tokens that are not on the grid.
        grid: ``(height, width)`` of the remaining tokens, or None for a sequence.
        aligned: Whether query ``i`` and key ``i`` are the same token (self-attention).
    """

    queries: int
    keys: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool = False
    prefix: int = 0
    grid: tuple[int, int] | None = None
    aligned: bool = True


def softmax_flops(shape: CallShape) -> int:
    """Both matmuls of softmax attention, 2 FLOPs per multiply-add; causal by visible pairs."""
    pairs = shape.queries * shape.keys
    if shape.causal:
        square = min(shape.queries, shape.keys)
        pairs = square * (square + 1) // 2 + shape.queries * max(shape.keys - shape.queries, 0)
    return 2 * pairs * shape.heads * (shape.head_dim + shape.value_dim)
