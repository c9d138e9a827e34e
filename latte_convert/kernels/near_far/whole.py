"""near_far on all tokens at once, in operators that every graph format has: the form that an export traces.

It computes what ``summary`` and ``fields`` do block by block. There, sums run over sorted tokens; here, membership of
tokens in clusters is a matrix, so that they are products. Which token is in which window is a table of constants, and
far columns are shared by all windows instead of copied beside each. Any batch size fits; the number of tokens is fixed.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from latte_convert.kernels.near_far.clustering import cell_counts, features_of, grid_cells, moments, take
from latte_convert.kernels.near_far.fields import Attended, log_total, merge
from latte_convert.kernels.near_far.summary import hide, in_views, level_of, lowest
from latte_convert.kernels.near_far.windows import Places, Tiling


def attend_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    places: Places,
    tiling: Tiling | None,
    scale: float,
    *,
    heads: int,
    clusters: int,
    steps: int,
    views: int,
) -> Tensor:
    """``near_far_attention`` on ``(G, N, ·)``, heads of all samples.

    ``seen`` is bool ``(G, Nk)``; ``bias`` is broadcast to ``(B, heads, Nq, Nk)``.
    """
    first = places.prefix
    keys, values, inner = key[:, first:], value[:, first:], None if seen is None else seen[:, first:]
    asked = inner if places.paired else None
    mean, spread = moments(query, asked)
    pull = hide(scale * mean @ keys.mT, inner)
    rows, columns = cell_counts(places.cells_of, clusters)
    count = rows * columns
    assign = grid_cells(places.cells_of, clusters, key.device).expand(keys.shape[0], -1)
    features = features_of(keys, pull[:, 0], spread, inner) if steps else keys
    for _ in range(steps):
        means, _, mass = products_of_clusters(features, pull, membership(assign, count), assign)
        assign = nearest_of(features, means[:, 0], mass[:, 0])
    member = membership(assign, count)
    left = None if tiling is None else _left(pull[:, 0], member, assign, tiling)
    beside = None if bias is None else _biases(bias, pull[:, 0], member, assign, heads, query.shape[1], first, tiling)
    order, grouped, mean, pull = in_views(query, keys, mean, pull, scale=scale, views=views, seen=inner, asked=asked)
    shown, top, mass = products_of_clusters(torch.cat([keys, values], dim=-1), pull, member, assign)
    centre, shown = shown[..., : key.shape[2]], shown[..., key.shape[2] :]
    level = level_of(mass, top, centre, mean, scale)
    alone = key.new_zeros(key.shape[0], 1, first)
    if seen is not None:
        alone = alone.masked_fill(~seen[:, None, :first], lowest(alone))
    far_keys = torch.cat([key[:, None, :first].expand(-1, views, -1, -1), centre], dim=2)
    far_values = torch.cat([value[:, None, :first].expand(-1, views, -1, -1), shown], dim=2)
    added = torch.cat([alone.expand(-1, views, -1), level], dim=2)
    if left is not None:
        left = torch.cat([left.new_zeros(*left.shape[:2], first), left], dim=2)
    if order is None and tiling is not None and left is not None:
        distant = far_keys[:, 0], far_values[:, 0], added + left
        return _together(query * scale, keys, values, inner, tiling, distant, beside)
    far = _far(grouped * scale, order, far_keys, far_values, added, left, tiling, query.shape[1], beside)
    if tiling is None:
        return far.out
    return merge(_near(query * scale, keys, values, inner, tiling, beside), far)


class _Biases(NamedTuple):
    """As ``fields.Bias``; ``near`` is ``(G, windows, queries, places)``, None without a near field."""

    near: Tensor | None
    far: Tensor


def _biases(
    bias: Tensor,
    pull: Tensor,
    member: Tensor,
    assign: Tensor,
    heads: int,
    queries: int,
    first: int,
    tiling: Tiling | None,
) -> _Biases:
    """What a bias adds to logits near and far."""

    def of_all(part: Tensor) -> Tensor:
        return part.expand(member.shape[0] // heads, heads, *part.shape[2:]).flatten(0, 1).to(pull.dtype)

    weight, mass = _weights(pull, member, assign)
    share = member * weight[..., None] / mass.masked_fill(mass == 0, 1)[:, None]
    share = share.reshape(-1, heads, *share.shape[1:])
    whole = bias.expand(-1, -1, queries, -1)
    means = (whole[..., first:].to(pull.dtype) @ share).flatten(0, 1)
    far = torch.cat([of_all(whole[..., :first]), means], dim=-1)
    if tiling is None:
        return _Biases(None, far)
    query, _ = _table(tiling, (0, 0), bias.device)
    key, _ = _table(tiling, tiling.halo, bias.device)
    asked, seen = query.reshape(tiling.number, -1, 1), key.reshape(tiling.number, 1, -1)
    return _Biases(of_all(whole[:, :, asked, first + seen]), far)


def _weights(pull: Tensor, member: Tensor, assign: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each token in its cluster's own unit, ``(G, n)``, and their sums, ``(G, c)``."""
    floor = pull.new_full((pull.shape[0], member.shape[2]), torch.finfo(pull.dtype).min)
    weight = (pull - floor.scatter_reduce(1, assign, pull, "amax").gather(1, assign)).exp()
    return weight, (member * weight[..., None]).sum(1)


def membership(assign: Tensor, count: int) -> Tensor:
    """Whether a token is in a cluster, bool ``(G, n, count)``."""
    return assign[..., None] == torch.arange(count, device=assign.device)


def products_of_clusters(tokens: Tensor, pull: Tensor, member: Tensor, assign: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``clustering.cluster_means`` by products: means, the largest ``pull`` and the mass of each cluster."""
    views = pull.shape[1]
    floor = pull.new_full((pull.shape[0], views, member.shape[2]), torch.finfo(pull.dtype).min)
    members = assign[:, None].expand(-1, views, -1)
    top = floor.scatter_reduce(2, members, pull.detach(), "amax")
    weight = (pull - top.gather(2, members)).exp()
    share = member[:, None] * weight[..., None]
    mass = share.sum(2)
    means = share.mT @ tokens[:, None] / mass.masked_fill(mass == 0, 1)[..., None]
    return means, top, mass


def nearest_of(features: Tensor, means: Tensor, mass: Tensor) -> Tensor:
    """The cluster with the nearest mean, ``(G, n)``; never one that is empty."""
    offset = (-0.5 * means.square().sum(-1)).masked_fill(mass == 0, lowest(means))
    return (features @ means.mT + offset[:, None]).argmax(-1)


def _left(pull: Tensor, member: Tensor, assign: Tensor, tiling: Tiling) -> Tensor:
    """Logarithm of the share of each cluster's mass outside the region of each window, ``(G, windows, c)``."""
    count = member.shape[2]
    weight, mass = _weights(pull, member, assign)
    table, inside = _table(tiling, tiling.halo, pull.device)
    windows = torch.arange(tiling.number, device=pull.device).repeat_interleave(tiling.region_tokens)
    index = assign.index_select(1, table) + count * windows
    near = pull.new_zeros(pull.shape[0], tiling.number * count).scatter_add(
        1, index, weight.index_select(1, table) * inside
    )
    share = 1 - near.reshape(-1, tiling.number, count) / mass.masked_fill(mass == 0, 1)[:, None]
    none = share <= 64 * torch.finfo(share.dtype).eps  # what remains of a cluster in the region is rounding
    return share.masked_fill(none, 1).log().masked_fill(none, lowest(share))


@functools.cache
def _places(tiling: Tiling, halo: tuple[int, int]) -> list[int | None]:
    """The token at each place of each window with a halo; None over the edge."""
    (rows, columns), (height, width) = tiling.grid, tiling.window
    places: list[int | None] = []
    for top, left in product(range(tiling.counts[0]), range(tiling.counts[1])):
        lines = range(top * height - halo[0], (top + 1) * height + halo[0])
        across = range(left * width - halo[1], (left + 1) * width + halo[1])
        inside = ((0 <= y < rows and 0 <= x < columns, y * columns + x) for y, x in product(lines, across))
        places += [token if fits else None for fits, token in inside]
    return places


def _table(tiling: Tiling, halo: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The token at each place, ``(windows·places,)``, some token over the edge; and 1, or 0 over the edge."""
    places = _places(tiling, halo)
    inside = torch.tensor([float(token is not None) for token in places], device=device)
    return torch.tensor([token or 0 for token in places], device=device), inside


def _windows(tokens: Tensor, tiling: Tiling, halo: tuple[int, int]) -> Tensor:
    """``(G, n, c)`` to ``(G, windows, places, c)``; some token over the edge."""
    table, _ = _table(tiling, halo, tokens.device)
    return tokens.index_select(1, table).reshape(tokens.shape[0], tiling.number, -1, tokens.shape[2])


def _merged(windows: Tensor, tiling: Tiling) -> Tensor:
    """The inverse of ``_windows`` without a halo."""
    where = {token: place for place, token in enumerate(_places(tiling, (0, 0)))}
    order = torch.tensor([where[token] for token in range(tiling.grid[0] * tiling.grid[1])], device=windows.device)
    return windows.flatten(1, 2).index_select(1, order)


def _near_logits(query: Tensor, key: Tensor, seen: Tensor | None, tiling: Tiling, bias: _Biases | None) -> Tensor:
    """Logits of the queries of each window with the keys of its region, ``(G, windows, queries, places)``."""
    logits = _windows(query, tiling, (0, 0)) @ _windows(key, tiling, tiling.halo).mT
    if bias is not None and bias.near is not None:
        logits = logits + bias.near
    _, inside = _table(tiling, tiling.halo, key.device)
    shown = inside.reshape(1, tiling.number, 1, -1)
    if seen is not None:
        shown = shown * _windows(seen[..., None].to(key.dtype), tiling, tiling.halo)[..., 0][:, :, None]
    return logits + (1 - shown) * lowest(logits)


def _together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    tiling: Tiling,
    far: tuple[Tensor, Tensor, Tensor],
    bias: _Biases | None,
) -> Tensor:
    """Regions and far columns under one softmax; ``far`` is their key, value and what is added to their logits."""
    near = _near_logits(query, key, seen, tiling, bias)
    distant = _windows(query, tiling, (0, 0)) @ far[0][:, None].mT + far[2][:, :, None]
    if bias is not None:
        distant = distant + _windows(bias.far, tiling, (0, 0))
    weights = torch.cat([near, distant], dim=-1).softmax(-1)
    places = near.shape[3]
    out = weights[..., :places] @ _windows(value, tiling, tiling.halo) + weights[..., places:] @ far[1][:, None]
    return _merged(out, tiling)


def _near(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, tiling: Tiling, bias: _Biases | None
) -> Attended:
    """Attention of each window to its region."""
    logits = _near_logits(query, key, seen, tiling, bias)
    weights = logits.softmax(-1)
    out = weights @ _windows(value, tiling, tiling.halo)
    return Attended(_merged(out, tiling), _merged(log_total(logits, weights), tiling))


def _far(
    query: Tensor,
    order: Tensor | None,
    key: Tensor,
    value: Tensor,
    added: Tensor,
    left: Tensor | None,
    tiling: Tiling | None,
    queries: int,
    bias: _Biases | None,
) -> Attended:
    """Attention of the queries of each view, ``(G, V, m, d)``, to the far columns as it sees them."""
    logits = query @ key.mT + added[:, :, None]
    if tiling is not None and left is not None:
        window = tiling.window_of(key.device)
        if order is None:
            logits = logits + left.index_select(1, window)[:, None]
        else:
            window = window[order.clamp_max(queries - 1)].flatten(1)
            logits = logits + take(left, window).reshape(logits.shape)
    if bias is not None:
        own = bias.far if order is None else take(bias.far, order.clamp_max(queries - 1).flatten(1))
        logits = logits + own.reshape(logits.shape)
    weights = logits.softmax(-1)
    whole = [x.flatten(1, 2) for x in (weights @ value, log_total(logits, weights))]
    if order is not None:
        flat = order.flatten(1)
        turns = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
        back = torch.zeros_like(flat).scatter(1, flat, turns)[:, :queries]
        whole = [take(x, back) for x in whole]
    return Attended(*whole)
