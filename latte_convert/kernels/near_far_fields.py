"""The columns that a window of queries sees: those of its region, and those of the prefix and the clusters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from latte_convert.kernels.clustering import Clusters, sums_by
from latte_convert.kernels.near_far_windows import Tiling


class Field(NamedTuple):
    """Keys and values, ``(A, B, n, ·)``, and what is added to their logits, ``(A, B, 1, n)``, for each of B windows."""

    key: Tensor
    value: Tensor
    bias: Tensor


def _lowest(like: Tensor) -> float:
    """A stand-in for -inf that stays finite when a logit is added."""
    return torch.finfo(like.dtype).min / 2


def far_bias(far: Clusters, centre: Tensor, tiling: Tiling | None, seen: Tensor | None, prefix: int) -> Tensor:
    """Bias of the prefix keys and of the clusters less a window's own members, ``(G, windows or 1, 1, p + c)``."""
    mass = far.mass[:, None]
    if tiling is not None:
        mass = mass - _own_mass(far, tiling)
    # What remains of a cluster that lies in the window is rounding.
    none = mass <= 64 * torch.finfo(mass.dtype).eps * far.mass[:, None]
    level = far.top - (far.key @ centre.mT).squeeze(-1)
    bias = (mass.masked_fill(none, 1).log() + level[:, None]).masked_fill(none, _lowest(mass))
    first = bias.new_zeros(*bias.shape[:2], prefix)
    if seen is not None:
        first = first.masked_fill(~seen[:, None, :prefix], _lowest(mass))
    return torch.cat([first, bias], dim=-1)[:, :, None]


def _own_mass(far: Clusters, tiling: Tiling) -> Tensor:
    """Mass of each cluster's members in the region of each window, ``(G, windows, c)``."""
    heads, count = far.mass.shape
    bins = heads * tiling.number
    assign = tiling.regions(far.assign[..., None]).reshape(bins, -1)
    weight = tiling.regions(far.weight[..., None]).reshape(-1)
    index = assign + count * torch.arange(bins, device=assign.device)[:, None]
    return sums_by(index.flatten(), weight, bins * count).reshape(heads, tiling.number, count)


def near_field(key: Tensor, value: Tensor, seen: Tensor | None, tiling: Tiling) -> Field:
    """The keys of each region, ``(G·columns, rows, n, ·)``."""
    inside = key.new_ones(1, key.shape[1], 1) if seen is None else seen[..., None].to(key.dtype)
    bias = (1 - tiling.regions(inside).mT) * _lowest(key)
    regions = tiling.regions(key)
    return Field(regions, tiling.regions(value), bias.repeat(len(regions) // len(bias), 1, 1, 1))


def joint(query: Tensor, near: Field, far: Field, scale: float) -> Tensor:
    """One softmax over both fields, ``(G, windows, n, dv)``, from one over each and its log-sum-exp."""
    near_out, near_lse = attend(query.reshape(*near.key.shape[:2], *query.shape[2:]), near, scale)
    far_out, far_lse = attend(query, far, scale)
    share = (far_lse - near_lse.reshape(far_lse.shape)).sigmoid()[..., None]
    return torch.lerp(near_out.reshape(far_out.shape), far_out, share)


def attend(query: Tensor, field: Field, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention ``(A, B, m, dv)`` and its log-sum-exp ``(A, B, m)``; the field may be shared by all B."""
    key, value, bias = field
    if _fusible(query, key, value, bias):
        shared = (query.shape[1], -1, -1)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        key, value = key.expand(-1, *shared), value.expand(-1, *shared)
        out, lse = fused(query, key, value, attn_mask=bias, scale=scale)
        return out, lse
    logits = scale * query @ key.mT + bias
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp() @ value, lse


def _fusible(*tensors: Tensor) -> bool:
    """Whether the CPU's fused attention does it, which knows no gradient of its log-sum-exp."""
    query, _, value, _ = tensors
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    plain = query.device.type == "cpu" and query.dtype is torch.float32 and query.shape[-1] == value.shape[-1]
    return plain and not tracked and not torch.compiler.is_compiling() and all(t.stride(-1) == 1 for t in tensors)
