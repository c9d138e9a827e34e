"""Softmax attention, written out."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import visible_keys, widen


def softmax_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Softmax attention; shapes as in ``Kernel.forward``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    logits = scale * widen(query) @ widen(key).mT
    visible = visible_keys(query, key, mask, causal)
    # The finite stand-in for -inf keeps rows without keys, and their gradients, free of NaN.
    weights = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).softmax(-1) * visible
    return (weights @ widen(value)).to(query.dtype)
