"""Operators of PyTorch that its exporter to ONNX has no form of, or one that needs more memory than it must."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch

LOGITS = 1 << 22
"""Logits of one sample to hold at a time, where the number of tokens is fixed."""


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
        pieces = None if attn_mask is not None or is_causal or enable_gqa else _pieces(query.shape, key.shape)
        if pieces is None:
            return whole(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        axis, bounds = pieces
        scaled = op.Mul(query, op.Constant(value_float=scale or query.shape[3] ** -0.5))
        turned = op.Transpose(key, perm=[0, 1, 3, 2])
        found = []
        for start, end in bounds:
            own = [
                op.Slice(x, *(op.Constant(value_ints=[at]) for at in (start, end, axis))) if axis == 1 or i == 0 else x
                for i, x in enumerate((scaled, turned, value))
            ]
            found.append(op.MatMul(op.Softmax(op.MatMul(own[0], own[1]), axis=-1), own[2]))
        return found[0] if len(found) == 1 else op.Concat(*found, axis=axis)

    return {torch.ops.aten.sort.stable: sort_stable, torch.ops.aten.scaled_dot_product_attention.default: attention}


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
    size = ceil(queries / ceil(heads * queries * keys / LOGITS))
    return 2, [(start, min(start + size, queries)) for start in range(0, queries, size)]


_UINT8, _BOOL = 2, 9
"""ONNX's numbers of the types that its ``TopK`` does not take."""
