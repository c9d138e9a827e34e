"""Operators of PyTorch that its exporter to ONNX has no form of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def translations() -> dict[Any, Callable[..., Any]]:
    """By operator: its form in ONNX, for ``torch.onnx.export``."""
    from onnxscript import opset18

    op: Any = opset18

    def sort_stable(tokens: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        """``TopK`` of all: among equals the lower index comes first, which is what stable means."""
        size = op.Gather(op.Shape(tokens), op.Constant(value_ints=[dim]))
        as_number = op.Cast(tokens, to=1) if tokens.dtype in (_UINT8, _BOOL) else tokens
        values, places = op.TopK(as_number, size, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, tokens), places

    return {torch.ops.aten.sort.stable: sort_stable}


_UINT8, _BOOL = 2, 9
"""ONNX's numbers of the types that its ``TopK`` does not take."""
