"""Operators of PyTorch that its exporter to ONNX has no form of, or one that needs more memory than it must."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch

LOGITS = 1 << 22
"""Logits of one sample to hold at a time, about, where the number of tokens is fixed."""
MOST = 32
"""Pieces that attention is cut into at most: each takes nodes in the graph."""


def translations() -> dict[Any, Callable[..., Any]]:
    """By operator: its form in ONNX, for ``torch.onnx.export``."""
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention as whole

    op: Any = opset18

    def sort_stable(tokens: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        """``TopK`` of all: among equals the lower index comes first, which is what stable means."""
        size = op.Gather(op.Shape(tokens), op.Constant(value_ints=[dim]))
        as_number = op.Cast(tokens, to=1) if tokens.dtype in (_UINT8, _BOOL) else tokens
        values, places = op.TopK(as_number, size, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, tokens), places

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Softmax attention some queries at a time, or head by head: all logits at once are B·H·N² numbers."""
        simple = not (is_causal or enable_gqa) and (attn_mask is None or _floats(attn_mask))
        pieces = _pieces(query.shape, key.shape) if simple else None
        if pieces is None:
            return whole(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        axis, bounds = pieces

        def piece(of: Any, start: int, end: int) -> Any:
            return op.Slice(of, *(op.Constant(value_ints=[at]) for at in (start, end, axis)))

        scaled = op.Mul(query, op.Constant(value_float=scale or query.shape[3] ** -0.5))
        turned, found = op.Transpose(key, perm=[0, 1, 3, 2]), []
        for bound in bounds:
            keys, values = (piece(x, *bound) if axis == 1 else x for x in (turned, value))
            logits = op.MatMul(piece(scaled, *bound), keys)
            if attn_mask is not None:
                logits = op.Add(logits, attn_mask if attn_mask.shape[axis] == 1 else piece(attn_mask, *bound))
            found.append(op.MatMul(op.Softmax(logits, axis=-1), values))
        return found[0] if len(found) == 1 else op.Concat(*found, axis=axis)

    return {torch.ops.aten.sort.stable: sort_stable, torch.ops.aten.scaled_dot_product_attention.default: attention}


def _floats(mask: Any) -> bool:
    """Whether a mask is ``(B, H, Nq, Nk)`` numbers that are added to logits, the number of heads and queries known."""
    known = mask.shape is not None and len(mask.shape) == 4 and all(isinstance(mask.shape[i], int) for i in (1, 2))
    return known and mask.dtype in (_FLOAT, _DOUBLE)


def _pieces(query: Any, key: Any) -> tuple[int, list[tuple[int, int]]] | None:
    """The axis along which attention is cut, and from where to where; None where its shape is not known enough.

    Args:
        query: Shape of the queries, ``(B, H, Nq, d)``; what is open is no number.
        key: That of the keys.
    """
    if query is None or key is None or len(query) != 4 or not all(isinstance(query[i], int) for i in (1, 3)):
        return None
    heads, queries, keys = query[1], query[2], key[2]
    if not isinstance(queries, int) or not isinstance(keys, int):
        return 1, [(head, head + 1) for head in range(heads)]
    size = ceil(queries / min(MOST, ceil(heads * queries * keys / LOGITS)))
    return 2, [(start, min(start + size, queries)) for start in range(0, queries, size)]


_FLOAT, _UINT8, _BOOL, _DOUBLE = 1, 2, 9, 11
"""ONNX's numbers of types."""
