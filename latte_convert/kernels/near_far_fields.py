"""The columns that a window of queries sees: those of its region, and those of the prefix and the clusters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.kernels.clustering import Clusters, block_size, sums_by
from latte_convert.kernels.near_far_windows import Tiling


class Field(NamedTuple):
    """Keys and values, ``(G, n, ·)``, and what is added to their logits, ``(G, windows or 1, n)``."""

    key: Tensor
    value: Tensor
    bias: Tensor


def _lowest(like: Tensor) -> float:
    """A stand-in for -inf that stays finite when a logit is added."""
    return torch.finfo(like.dtype).min / 2


def far_bias(far: Clusters, centre: Tensor, tiling: Tiling | None, seen: Tensor | None, prefix: int) -> Tensor:
    """Bias of the prefix keys and of the clusters less a window's own members, ``(G, windows or 1, p + c)``."""
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
    return torch.cat([first, bias], dim=-1)


def _own_mass(far: Clusters, tiling: Tiling) -> Tensor:
    """Mass of each cluster's members in the region of each window, ``(G, windows, c)``."""
    heads, count = far.mass.shape
    bins = heads * tiling.number
    assign = tiling.regions(far.assign[..., None]).reshape(bins, -1)
    weight = tiling.regions(far.weight[..., None]).reshape(-1)
    index = assign + count * torch.arange(bins, device=assign.device)[:, None]
    return sums_by(index.flatten(), weight, bins * count).reshape(heads, tiling.number, count)


def attend(query: Tensor, far: Field, scale: float) -> Tensor:
    """Softmax attention to columns that all queries share, ``(G, n, dv)``."""
    return F.scaled_dot_product_attention(query, far.key, far.value, attn_mask=far.bias, scale=scale)


def attend_windows(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, far: Field, tiling: Tiling, scale: float
) -> Iterator[Tensor]:
    """Softmax attention of each window to its region and the far field, some heads or rows of windows at a time.

    The columns of a window are copied side by side, so that one product and one softmax see them all.

    Args:
        query: ``(G, n, d)``.
        key: ``(G, n, d)``, of the same tokens.
        value: ``(G, n, dv)``.
        seen: bool ``(G, n)``, True where a key may be attended to; None if all may.
        far: The columns besides those of the region.
        tiling: The windows.
        scale: Factor on the logits.

    Yields:
        ``(·, dv)``, which together are the ``G·n`` tokens in their order.
    """
    hidden = _hidden(key, seen, tiling).expand(len(key), -1, -1, -1)
    bias = far.bias.reshape(len(key), *tiling.counts, -1)
    row = tiling.counts[1] * (tiling.region_tokens + far.key.shape[1]) * max(key.shape[2], value.shape[2])
    heads = max(1, block_size(key) // (row * tiling.counts[0]))
    rows = max(1, block_size(key) // row)
    for first, top in product(range(0, len(key), heads), range(0, tiling.counts[0], rows)):
        some, strip = slice(first, first + heads), range(tiling.counts[0])[top : top + rows]
        windows = tiling.windows(query[some], strip)
        added = torch.cat([part[some, top : top + rows] for part in (hidden, bias)], dim=-1).flatten(0, 2)[:, None]
        columns = _columns(tiling.regions(key[some], strip), far.key[some])
        weights = torch.baddbmm(added, windows.flatten(0, 2).flatten(1, 2), columns.mT, alpha=scale).softmax(-1)
        columns = _columns(tiling.regions(value[some], strip), far.value[some])
        yield tiling.merge((weights @ columns).reshape(*windows.shape[:-1], -1), top).flatten(0, 1)


def _hidden(key: Tensor, seen: Tensor | None, tiling: Tiling) -> Tensor:
    """What is added to the logits of a region, ``(G or 1, *counts, n)``: 0, and the lowest where there is no key."""
    inside = key.new_ones(1, key.shape[1], 1) if seen is None else seen[..., None].to(key.dtype)
    return (1 - tiling.regions(inside).flatten(3)) * _lowest(key)


def _columns(regions: Tensor, far: Tensor) -> Tensor:
    """The tokens of each region, then the far ones: ``(windows of all heads, n, c)``."""
    near = regions.shape[3] * regions.shape[4]
    columns = regions.new_empty(*regions.shape[:3], near + far.shape[1], far.shape[2])
    columns[..., :near, :].view(regions.shape).copy_(regions)
    columns[..., near:, :] = far[:, None, None]
    return columns.flatten(0, 2)


def stack(parts: Iterable[Tensor], out: Tensor) -> Tensor:
    """All parts in one tensor, ``out`` without gradients: then no part lives longer than the next one takes."""
    if torch.is_grad_enabled():
        return torch.cat(list(parts)).to(out.dtype)
    first = 0
    for part in parts:
        out[first : first + len(part)] = part
        first += len(part)
    return out
