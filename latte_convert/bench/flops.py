"""Arithmetic of one attention call: by the source paper's counting, and truly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from latte_convert.errors import RecipeError, nearest
from latte_convert.kernels.latte import CAUSAL_CHUNK


@dataclass(frozen=True)
class Flops:
    """Operations of one attention layer on one sample, projections not included.

    Attributes:
        paper: The source paper's counting: softmax ``N²·D``, LATTE ``N·H·(d+1)²``. Half a matmul each, and
            one of softmax's two: comparable with each other only.
        true: Every matmul that runs, ``K~ᵀ1`` and ``Q^·K~ᵀ1`` included, 2 per multiply-add. Elementwise work
            is left out.
    """

    paper: int
    true: int


@dataclass(frozen=True)
class _Shape:
    queries: int
    keys: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool


def attention_flops(
    kernel: str,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    value_dim: int | None = None,
    causal: bool = False,
) -> Flops:
    """Count the operations of one attention call.

    The paper's formulas know self-attention with equal head sizes. Where the shapes differ they are read
    as: softmax ``Nq·Nk·H·d``; LATTE the mean of ``Nq`` and ``Nk``, and ``(d+1)·(dv+1)``.

    Args:
        kernel: Name of the kernel, ``exact`` or ``latte``.
        queries: Number of query tokens, Nq.
        keys: Number of key tokens, Nk.
        heads: Number of heads, H.
        head_dim: Channels per head of query and key, d.
        value_dim: Channels per head of value, dv; ``head_dim`` by default.
        causal: Whether a query sees only the keys up to its own position. Exact attention is then counted
            by visible pairs, LATTE by what its chunked prefix sums compute. ``paper`` ignores it.

    Returns:
        Both counts, per sample.

    Raises:
        RecipeError: Where no count is known for ``kernel``.
    """
    if kernel not in _COUNTS:
        raise RecipeError(f"no FLOP count for kernel {kernel!r} ({nearest(kernel, _COUNTS)})")
    shape = _Shape(queries, keys, heads, head_dim, head_dim if value_dim is None else value_dim, causal)
    return _COUNTS[kernel](shape)


def _exact(s: _Shape) -> Flops:
    pairs = s.queries * s.keys
    if s.causal:
        square = min(s.queries, s.keys)
        pairs = square * (square + 1) // 2 + s.queries * max(s.keys - s.queries, 0)
    return Flops(
        paper=s.queries * s.keys * s.heads * s.head_dim,
        true=2 * pairs * s.heads * (s.head_dim + s.value_dim),
    )


def _latte(s: _Shape) -> Flops:
    paper = (s.queries + s.keys) * s.heads * (s.head_dim + 1) * (s.value_dim + 1) // 2
    # The divisor is one more value column of both products.
    columns = s.value_dim + 1
    if not s.causal:
        return Flops(paper=paper, true=2 * (s.queries + s.keys) * s.heads * s.head_dim * columns)
    square = min(s.queries, s.keys)
    chunked = -(-square // CAUSAL_CHUNK) * CAUSAL_CHUNK
    past = max(s.keys - s.queries, 0)
    inside = CAUSAL_CHUNK * (s.head_dim + columns)  # query·keyᵀ, then ·value, within a chunk
    states = 2 * s.head_dim * columns  # of the keys, and read by the queries
    padding = columns  # the padding feature's sum over values
    per_head = chunked * (inside + states + padding) + past * columns * (s.head_dim + 1)
    return Flops(paper=paper, true=2 * s.heads * per_head)


_COUNTS: dict[str, Callable[[_Shape], Flops]] = {"exact": _exact, "latte": _latte}
