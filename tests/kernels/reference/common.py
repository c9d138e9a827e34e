"""What every reference needs."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Which query sees which key: bool, broadcastable to ``(B, H, Nq, Nk)``."""
    queries, keys = query.shape[-2], key.shape[-2]
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
    if causal:
        last = torch.arange(queries, device=query.device) + keys - queries
        visible = visible & (torch.arange(keys, device=query.device) <= last[:, None])
    return visible if mask is None else visible & mask[:, None, None, :]


def widen(tensor: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
