"""Attention to the near field, window by window, to the far field, view by view, and both under one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from latte_convert import compat
from latte_convert.graphs import plain, recorded, sizes
from latte_convert.kernels.near_far.bias import near_bias
from latte_convert.kernels.near_far.clustering import block_size, sums_by, take
from latte_convert.kernels.near_far.summary import Summary, lowest
from latte_convert.kernels.near_far.windows import Tiling

# The only attention of PyTorch on a CPU that tells its denominators, too.
_FUSED = compat.CPU_ATTENTION.get()


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
        left: ``(G, windows, c)``: logarithm of what is left of them outside the region of a window. Without a near
            field there is one window, and all is left.
    """

    key: Tensor
    value: Tensor
    level: Tensor
    left: Tensor


class Bias(NamedTuple):
    """What is added to the logits of each query.

    Attributes:
        near: ``(G, n, n)``, a view of the model's own numbers, of the keys behind the prefix.
        far: ``(G, Nq, c)``, of the far columns.
    """

    near: Tensor
    far: Tensor

    def of_windows(self, heads: slice, rows: range, tiling: Tiling, together: bool) -> Tensor:
        """Of some heads and rows of windows, ``(windows, queries, columns)``; ``together`` with the far columns."""
        near = near_bias(self.near[heads], tiling, rows).flatten(0, 1)
        if not together:
            return near.to(self.far.dtype)
        far = tiling.windows(self.far[heads], rows).flatten(0, 2).flatten(1, 2)
        return torch.cat([near.to(far.dtype), far], dim=-1)


def far_columns(summary: Summary, key: Tensor, value: Tensor, seen: Tensor | None, tiling: Tiling | None) -> Far:
    """The columns that are not of a region; key, value, ``(G, p, ·)``, and ``seen`` are those of the prefix."""
    heads, views, _, _ = summary.key.shape
    level = key.new_zeros(heads, key.shape[1])
    if seen is not None:
        level = level.masked_fill(~seen, lowest(level))
    left = summary.mass.new_zeros(heads, 1, summary.key.shape[2]) if tiling is None else _left(summary, tiling)
    return Far(
        torch.cat([key[:, None].expand(-1, views, -1, -1), summary.key], dim=2),
        torch.cat([value[:, None].expand(-1, views, -1, -1), summary.value], dim=2),
        torch.cat([level[:, None].expand(-1, views, -1), summary.level], dim=2),
        torch.cat([left.new_zeros(*left.shape[:2], key.shape[1]), left], dim=2),
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


def attend_far(
    summary: Summary, far: Far, tiling: Tiling | None, queries: int, scale: float, bias: Tensor | None = None
) -> Attended:
    """Attention of the summary's ``queries`` queries to the far columns, view by view; ``bias`` is ``(G, Nq, c)``."""
    heads, views, size = sizes(summary.order)
    rows, key, value, level = (x.flatten(0, 1) for x in (summary.query, far.key, far.value, far.level[:, :, None]))
    order = summary.order.clamp_max(queries - 1)
    head = torch.arange(heads, device=rows.device)[:, None, None]
    if tiling is not None:
        window = (tiling.window_of(rows.device)[order] + tiling.number * head).flatten(0, 1)
    if bias is not None:
        asked = (order + queries * head).flatten(0, 1)
    parts = []
    columns = plain(key.shape[1])
    step, most = (max(1, block_size(rows) // each) for each in (size * columns, columns))
    for first, top in product(range(0, heads * views, step), range(0, size, most)):
        some, strip = slice(first, first + step), slice(top, top + most)
        added = level[some]
        if tiling is not None:
            inside = window[some, strip]
            left = far.left.flatten(0, 1).index_select(0, inside.flatten())
            added = left.reshape(*inside.shape, columns).add_(added)
        if bias is not None:
            own = asked[some, strip]
            added = added + bias.flatten(0, 1).index_select(0, own.flatten()).reshape(*own.shape, columns)
        found = _attend(rows[some, strip], key[some], value[some], added, scale)
        parts.append([x.flatten(0, 1) for x in found])
    whole = [torch.cat(x).reshape(heads, views * size, -1) for x in zip(*parts, strict=True)]
    if views > 1:
        flat = summary.order.flatten(1)
        back = torch.empty_like(flat).scatter(1, flat, torch.arange(views * size, device=flat.device).expand_as(flat))
        whole = [take(x, back[:, :queries]) for x in whole]
    return Attended(*whole)


def attend_together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    tiling: Tiling,
    scale: float,
    far: Far,
    bias: Bias | None = None,
) -> Iterator[Tensor]:
    """Attention of each window to its region and to far columns in one view, under one softmax.

    Arguments are those of ``attend_near``. Yields ``(·, dv)``, which together are the ``G·n`` tokens in their order.
    """
    for strip, logits, values in _windows(query, key, value, seen, tiling, scale, far, bias):
        yield tiling.merge(logits.softmax(-1) @ values, strip).flatten(0, 1)


def attend_near(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    tiling: Tiling,
    scale: float,
    bias: Bias | None = None,
) -> Attended:
    """Attention of each window to its region.

    Args:
        query: ``(G, n, d)``.
        key: ``(G, n, d)``, of the same tokens.
        value: ``(G, n, dv)``.
        seen: bool ``(G, n)``, True where a key may be attended to; None if all may.
        tiling: The windows.
        scale: Factor on the logits.
        bias: What is added to them, or None.
    """
    outs, totals = [], []
    for strip, logits, values in _windows(query, key, value, seen, tiling, scale, None, bias):
        weights = logits.softmax(-1)
        outs.append(tiling.merge(weights @ values, strip).flatten(0, 1))
        totals.append(tiling.merge(log_total(logits, weights), strip).flatten(0, 1))
    return Attended(*(torch.cat(x).reshape(*query.shape[:2], -1) for x in (outs, totals)))


def _windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    tiling: Tiling,
    scale: float,
    far: Far | None,
    bias: Bias | None,
) -> Iterator[tuple[range, Tensor, Tensor]]:
    """Rows of windows, their logits ``(windows, queries, n)`` and values ``(windows, n, dv)``, a block at a time.

    Far columns are copied beside those of each region, so that one product sees them all.
    """
    hidden = _hidden(key, seen, tiling).expand(len(key), -1, -1, -1)
    columns = 0
    if far is not None:
        columns, beside = plain(far.key.shape[2]), (far.left + far.level).reshape(len(key), *tiling.counts, -1)
    for some, strip in _strips(key, value, tiling, columns):
        windows = tiling.windows(query[some], strip).flatten(0, 2).flatten(1, 2)
        keys, values = (tiling.regions(x[some], strip) for x in (key, value))
        added = hidden[some, strip.start : strip.stop]
        if far is None:
            keys, values = (x.flatten(0, 2).flatten(1, 2) for x in (keys, values))
        else:
            keys, values = _columns(keys, far.key[some, 0]), _columns(values, far.value[some, 0])
            added = torch.cat([added, beside[some, strip.start : strip.stop]], dim=-1)
        added = added.flatten(0, 2)[:, None]
        if bias is not None:
            added = added + bias.of_windows(some, strip, tiling, far is not None)
        yield strip, torch.baddbmm(added, windows, keys.mT, alpha=scale), values


def _columns(regions: Tensor, far: Tensor) -> Tensor:
    """The tokens of each region, then the far ones: ``(windows of all heads, n, c)``."""
    near = regions.shape[3] * regions.shape[4]
    columns = regions.new_empty(*regions.shape[:3], near + far.shape[1], far.shape[2])
    columns[..., :near, :].view(regions.shape).copy_(regions)
    columns[..., near:, :] = far[:, None, None]
    return columns.flatten(0, 2)


def _strips(key: Tensor, value: Tensor, tiling: Tiling, columns: int) -> Iterator[tuple[slice, range]]:
    """Heads, and rows of windows, whose regions and as many more columns fill a block."""
    row = tiling.counts[1] * (tiling.region_tokens + columns) * max(plain(key.shape[2]), plain(value.shape[2]))
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
    if _FUSED is None or not _serves(query, value):
        logits = torch.baddbmm(added, query, key.mT, alpha=scale)
        weights = logits.softmax(-1)
        return Attended(weights @ value, log_total(logits, weights))
    added = added[:, None].expand(-1, -1, query.shape[1], -1)
    # Its output has the strides of the query, and is wrong where the channels are not next to each other.
    heads = (x[:, None] for x in (query.contiguous(), key, value))
    out, total = _FUSED(*heads, attn_mask=added, scale=scale)
    return Attended(out[:, 0], total.reshape(*query.shape[:2], 1))


def log_total(logits: Tensor, weights: Tensor) -> Tensor:
    """Logarithm of the denominators of a softmax: its largest weight is ``exp(largest logit - total)``.

    That weight is at least one over the number of columns, so its logarithm is safe.
    """
    return logits.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()


def _serves(query: Tensor, value: Tensor) -> bool:
    """Whether the fused attention does: on a CPU, in inference, outside of a compiled graph."""
    eager = not torch.compiler.is_compiling() and not recorded()
    return query.device.type == "cpu" and eager and query.shape[2] == value.shape[2]


def merge(near: Attended, far: Attended) -> Tensor:
    """Attention to the keys of both, ``(G, Nq, dv)``."""
    return torch.lerp(far.out, near.out, (near.total - far.total).sigmoid())
