"""Ranks, and how many are small enough: recall at k and accuracy at k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BLOCK = 256


def rank_of(scores: Array, right: Array | int) -> int:
    """How many wrong items score at least as much as the best right one; 0 where a right one is first.

    A tie counts against the model: one that gives everything the same score is never right.

    Args:
        scores: ``(N,)``.
        right: Index or indices of the right items.
    """
    best = scores[right].max()
    return int((scores >= best).sum() - (scores[right] >= best).sum())


def ranks(queries: Array, gallery: Array, right: Sequence[Array]) -> Array:
    """Rank of the best right item for every query, by cosine; see ``rank_of``.

    Args:
        queries: Unit vectors ``(Q, D)``.
        gallery: Unit vectors ``(G, D)``.
        right: For each query the indices of the right items.
    """
    rows = (row for block in _blocks(queries) for row in block @ gallery.T)
    return np.array([rank_of(row, indices) for row, indices in zip(rows, right, strict=True)], dtype=np.int64)


def _blocks(rows: Array) -> Iterator[Array]:
    """Some rows at a time, so that a large gallery needs no table of all pairs."""
    return (rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK))


def accuracies(ranked: Array, classes: int) -> dict[str, float]:
    """``accuracy``, and ``top5`` where there are more than five classes, of ranks ``(N,)``."""
    result = {"accuracy": float((ranked < 1).mean())}
    return result | {"top5": float((ranked < 5).mean())} if classes > 5 else result
