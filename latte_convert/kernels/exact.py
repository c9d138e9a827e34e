"""Softmax attention behind the kernel signature: with it, a rewrite must reproduce the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.kernels.base import Kernel, check_mask

if TYPE_CHECKING:
    from latte_convert.adapters.base import TokenLayout


class ExactKernel(Kernel):
    """``softmax(scale · q kᵀ) v`` through ``F.scaled_dot_product_attention``, without parameters."""

    name = "exact"
    causal_form = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        causal: bool = False,
        layout: TokenLayout | None = None,
    ) -> Tensor:
        """Attend; see ``Kernel.forward``."""
        check_mask(mask, key)
        queries, keys = query.shape[-2], key.shape[-2]
        if mask is None and (not causal or queries == keys):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
        visible = query.new_ones((1, 1, queries, keys), dtype=torch.bool)
        if causal:  # SDPA's own is_causal aligns query 0 with key 0, which is wrong where Nq != Nk
            visible = visible.tril(keys - queries)
        if mask is not None:
            visible = visible & mask[:, None, None, :]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
        # What a row without keys gives depends on SDPA's backend.
        return out.masked_fill(~visible.any(-1, keepdim=True), 0)
