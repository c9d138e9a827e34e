"""Softmax attention with a key mask, exactly as the kernel contract wants it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.attention import AttentionCall, CallShape


def softmax_attention(call: AttentionCall) -> Tensor:
    """``softmax(scale · q kᵀ) v`` through ``F.scaled_dot_product_attention``; see ``Kernel.forward``."""
    query, key, value, mask, causal, scale = call.query, call.key, call.value, call.mask, call.causal, call.scale
    queries, keys = query.shape[-2], key.shape[-2]
    if call.merged is not None:  # proportional attention (Bolya et al., ICLR 2023): exp(s<q,k>) times the size
        wide = torch.promote_types(query.dtype, torch.float32)
        count = call.merged.size.to(wide).log().to(query.dtype)[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=count, scale=scale)
    bias = None if call.bias is None else call.bias.to(query.dtype)
    if mask is None and not causal and bias is not None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    if mask is None and (not causal or queries == keys) and bias is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    visible = query.new_ones((1, 1, queries, keys), dtype=torch.bool)
    if causal:  # SDPA's own is_causal aligns query 0 with key 0, which is wrong where Nq != Nk
        visible = visible.tril(keys - queries)
    if mask is not None:
        visible = visible & mask[:, None, None, :]
    seen = visible if bias is None else bias.masked_fill(~visible, float("-inf"))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    # What a row without keys gives depends on SDPA's backend.
    return out.masked_fill(~visible.any(-1, keepdim=True), 0)


def softmax_flops(shape: CallShape) -> int:
    """Both matmuls of softmax attention, 2 FLOPs per multiply-add; causal by visible pairs."""
    pairs = shape.queries * shape.keys
    if shape.causal:
        square = min(shape.queries, shape.keys)
        pairs = square * (square + 1) // 2 + shape.queries * max(shape.keys - shape.queries, 0)
    return 2 * pairs * shape.heads * (shape.head_dim + shape.value_dim)
