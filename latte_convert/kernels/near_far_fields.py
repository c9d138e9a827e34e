"""Attention to the near field, window by window, to the far field, view by view, and both under one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from latte_convert.kernels.clustering import block_size, sums_by
from latte_convert.kernels.near_far_summary import Summary, in_order, lowest
from latte_convert.kernels.near_far_windows import Tiling

# Not public, but the only attention of PyTorch on a CPU that tells its denominators, too.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class Attended(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        out: ``(G, Nq, dv)``.
        total: ``(G, Nq, 1)``: logarithm of the sum of the exponentials of the logits.
    """

    out: Tensor
    total: Tensor


class Far(NamedTuple):
    """Columns of the prefix and of the clusters, ``c`` together.

    Attributes:
        key: ``(G, V, c, d)``, as each view sees them.
        value: ``(G, V, c, dv)``.
        level: ``(G, V, c)``: added to their logits.
        left: ``(G, windows, c)``: logarithm of what is left of them outside the region of a window; None if all is.
    """

    key: Tensor
    value: Tensor
    level: Tensor
    left: Tensor | None


def far_columns(summary: Summary, key: Tensor, value: Tensor, seen: Tensor | None, tiling: Tiling | None) -> Far:
    """The columns that are not of a region; key, value, ``(G, p, ·)``, and ``seen`` are those of the prefix."""
    heads, views, _, _ = summary.key.shape
    level = key.new_zeros(heads, key.shape[1])
    if seen is not None:
        level = level.masked_fill(~seen, lowest(level))
    left = None
    if tiling is not None:
        left = _left(summary, tiling)
        left = torch.cat([left.new_zeros(*left.shape[:2], key.shape[1]), left], dim=-1)
    return Far(
        torch.cat([key[:, None].expand(-1, views, -1, -1), summary.key], dim=2),
        torch.cat([value[:, None].expand(-1, views, -1, -1), summary.value], dim=2),
        torch.cat([level[:, None].expand(-1, views, -1), summary.level], dim=2),
        left,
    )


def _left(summary: Summary, tiling: Tiling) -> Tensor:
    """Logarithm of the share of each cluster's mass outside the region of each window, ``(G, windows, c)``."""
    heads, count = summary.mass.shape
    bins = heads * tiling.number
    assign = tiling.regions(summary.assign[..., None]).reshape(bins, -1)
    weight = tiling.regions(summary.weight[..., None]).reshape(-1)
    index = assign + count * torch.arange(bins, device=assign.device)[:, None]
    inside = sums_by(index.flatten(), weight, bins * count).reshape(heads, tiling.number, count)
    mass = summary.mass.masked_fill(summary.mass == 0, 1)[:, None]
    share = 1 - inside / mass
    none = share <= 64 * torch.finfo(share.dtype).eps  # what remains of a cluster in the region is rounding
    return share.masked_fill(none, 1).log().masked_fill(none, lowest(share))


def attend_far(query: Tensor, order: Tensor, far: Far, tiling: Tiling | None, scale: float) -> Attended:
    """Attention of ``(G, Nq, d)`` to the far columns, in views of ``order``, ``(G, V, m)``."""
    heads, queries, _ = query.shape
    views, size = order.shape[1:]
    rows, back = in_order(query, order)
    rows, key, value, level = (x.flatten(0, 1) for x in (rows, far.key, far.value, far.level[:, :, None]))
    if far.left is not None and tiling is not None:
        window = tiling.window_of(query.device)[order.clamp_max(queries - 1)]
        window = (window + tiling.number * torch.arange(heads, device=query.device)[:, None, None]).flatten(0, 1)
    parts = []
    columns = key.shape[1]
    step, most = (max(1, block_size(query) // each) for each in (size * columns, columns))
    for first, top in product(range(0, heads * views, step), range(0, size, most)):
        some, strip = slice(first, first + step), slice(top, top + most)
        added = level[some]
        if far.left is not None:
            inside = window[some, strip]
            left = far.left.flatten(0, 1).index_select(0, inside.flatten())
            added = left.reshape(*inside.shape, columns).add_(added)
        found = _attend(rows[some, strip], key[some], value[some], added, scale)
        parts.append([x.flatten(0, 1) for x in found])
    whole = [torch.cat(x) for x in zip(*parts, strict=True)]
    if back is not None:
        back = back + views * size * torch.arange(heads, device=query.device)[:, None]
        whole = [x.index_select(0, back.flatten()) for x in whole]
    return Attended(*(x.reshape(heads, queries, -1) for x in whole))


def attend_near(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, tiling: Tiling, scale: float
) -> Attended:
    """Attention of each window to its region, some heads or rows of windows at a time.

    Args:
        query: ``(G, n, d)``.
        key: ``(G, n, d)``, of the same tokens.
        value: ``(G, n, dv)``.
        seen: bool ``(G, n)``, True where a key may be attended to; None if all may.
        tiling: The windows.
        scale: Factor on the logits.
    """
    hidden = _hidden(key, seen, tiling)
    outs, totals = [], []
    for some, strip in _strips(key, value, tiling):
        windows, keys, values = (
            x.flatten(0, 2).flatten(1, 2)
            for x in (tiling.windows(query[some], strip), *(tiling.regions(x[some], strip) for x in (key, value)))
        )
        added = hidden[some if seen is not None else slice(None), strip.start : strip.stop]
        added = added.expand(query[some].shape[0], -1, -1, -1).flatten(0, 2)[:, None]
        out, total = _attend(windows, keys, values, added, scale)
        outs.append(tiling.merge(out, strip).flatten(0, 1))
        totals.append(tiling.merge(total, strip).flatten(0, 1))
    return Attended(*(torch.cat(x).reshape(*query.shape[:2], -1) for x in (outs, totals)))


def _strips(key: Tensor, value: Tensor, tiling: Tiling) -> Iterator[tuple[slice, range]]:
    """Heads, and rows of windows, whose regions fill a block."""
    row = tiling.counts[1] * tiling.region_tokens * max(key.shape[2], value.shape[2])
    heads = max(1, block_size(key) // (row * tiling.counts[0]))
    rows = max(1, block_size(key) // row)
    for first, top in product(range(0, len(key), heads), range(0, tiling.counts[0], rows)):
        yield slice(first, first + heads), range(tiling.counts[0])[top : top + rows]


def _hidden(key: Tensor, seen: Tensor | None, tiling: Tiling) -> Tensor:
    """What is added to the logits of a region, ``(G or 1, *counts, n)``: 0, and the lowest where there is no key."""
    inside = key.new_ones(1, key.shape[1], 1) if seen is None else seen[..., None].to(key.dtype)
    return (1 - tiling.regions(inside).flatten(3)) * lowest(key)


def _attend(query: Tensor, key: Tensor, value: Tensor, added: Tensor, scale: float) -> Attended:
    """Softmax attention of ``(·, n, d)`` to ``(·, c, d)`` with ``(·, n or 1, c)`` added to the logits."""
    if _FUSED is not None and _serves(query, value):
        added = added[:, None].expand(-1, -1, query.shape[1], -1)
        # Its output has the strides of the query, and is wrong where the channels are not next to each other.
        heads = (x[:, None] for x in (query.contiguous(), key, value))
        out, total = _FUSED(*heads, attn_mask=added, scale=scale)
        return Attended(out[:, 0], total.reshape(*query.shape[:2], 1))
    logits = torch.baddbmm(added, query, key.mT, alpha=scale)
    weights = logits.softmax(-1)
    # The largest weight is exp(largest logit - total). It is at least 1/c, so its logarithm is safe.
    return Attended(weights @ value, logits.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log())


def _serves(query: Tensor, value: Tensor) -> bool:
    """Whether the fused attention does: on a CPU, in inference, outside of a compiled graph."""
    plain = query.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return plain and query.shape[2] == value.shape[2]


def merge(near: Attended, far: Attended) -> Tensor:
    """Attention to the keys of both, ``(G, Nq, dv)``."""
    return torch.lerp(far.out, near.out, (near.total - far.total).sigmoid())
