"""The far field of near_far: clusters of keys, and what they show to each group of queries; see ``near_far``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.graphs import plain, sizes
from latte_convert.kernels.near_far.clustering import (
    assignment_channels,
    cell_counts,
    cluster_means,
    counted_first,
    features_of,
    golden_places,
    grid_cells,
    kmeans,
    moments,
    sample_size,
    take,
    weigh,
)
from latte_convert.kernels.near_far.windows import Places

TURNS = 2
"""Steps of the power iteration that finds the direction in which queries differ most."""
LOOKED_AT = 64
"""Queries of a group that it looks at, where there are twice as many or more."""


class Summary(NamedTuple):
    """At most ``c`` clusters of the ``n`` keys of ``G`` heads, as each of ``V`` views sees them.

    Attributes:
        order: ``(G, V, m)``, int64: the queries of each view. Numbers from ``Nq`` on are padding, which the last
            views may hold so that all have the same size.
        query: ``(G, V, m, d)``: these queries, and some query in the place of none.
        key: ``(G, V, c, d)``.
        value: ``(G, V, c, dv)``.
        level: ``(G, V, c)``: what is added to the logit of a cluster that is seen whole; the lowest for an empty one.
        assign: ``(G, n)``, int64: the cluster of each key.
        weight: ``(G, n)``: how much the mean of all queries attends to each key, in its cluster's own unit.
        mass: ``(G, c)``: sum of the weights of each cluster.
    """

    order: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    level: Tensor
    assign: Tensor
    weight: Tensor
    mass: Tensor


def summarise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Places,
    *,
    scale: float,
    clusters: int,
    steps: int,
    views: int,
    seen: Tensor | None = None,
) -> Summary:
    """Cluster the keys, group the queries, and expand each cluster around the mean query of each group.

    Args:
        query: ``(G, Nq, d)``.
        key: ``(G, n, d)``, behind the prefix.
        value: ``(G, n, dv)``.
        places: Where they are.
        scale: Factor on the logits.
        clusters: Largest number of clusters.
        steps: Steps of k-means on the keys; without any, the clusters are the cells of a coarse grid.
        views: Largest number of groups of queries.
        seen: bool ``(G, n)``, True where a key counts; None if all do.
    """
    asked = seen if places.paired else None  # padding must not move the mean query
    mean, spread = moments(query, asked)
    pull = hide(scale * mean @ key.mT, seen)
    rows, columns = cell_counts(places.cells_of, clusters)
    count = rows * columns
    with torch.no_grad():
        assign = grid_cells(places.cells_of, clusters, key.device).expand(key.shape[:2])
        if steps:
            assign = kmeans(features_of(key, pull[:, 0], spread, seen), pull[:, 0], assign, count, steps)
    weight, _, mass = weigh(pull[:, 0], assign, count)
    order, grouped, mean, pull = in_views(query, key, mean, pull, scale=scale, views=views, seen=seen, asked=asked)
    means, top, own = cluster_means(torch.cat([key, value], dim=-1), pull, assign, count)
    centre, shown = means[..., : key.shape[2]], means[..., key.shape[2] :]
    level = level_of(own, top, centre, mean, scale)
    if order is None:
        order = torch.arange(query.shape[1], device=query.device).expand(len(query), 1, -1)
    return Summary(order, grouped, centre, shown, level, assign, weight, mass)


def in_views(
    query: Tensor,
    key: Tensor,
    mean: Tensor,
    pull: Tensor,
    *,
    scale: float,
    views: int,
    seen: Tensor | None,
    asked: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The order of the queries by view (None where there is one view), the queries, their mean, and its pull on keys.

    ``mean``, ``(G, 1, d)``, and ``pull``, ``(G, 1, n)``, are those of all queries.
    """
    if views == 1:
        return None, query[:, None], mean, pull
    order = views_of(query, moments(key, seen)[1], views, asked)
    grouped = in_order(query, order)
    mean = view_means(grouped, order, query.shape[1], asked)
    return order, grouped, mean, hide(scale * mean @ key.mT, seen)


def level_of(mass: Tensor, top: Tensor, centre: Tensor, mean: Tensor, scale: float) -> Tensor:
    """``level`` of ``Summary``, of the means of keys in clusters and of queries in views."""
    level = mass.masked_fill(mass == 0, 1).log() + top - scale * (centre @ mean[..., None]).squeeze(-1)
    return level.masked_fill(mass == 0, lowest(level))


@torch.no_grad()
def views_of(query: Tensor, spread: Tensor, views: int, asked: Tensor | None) -> Tensor:
    """Groups of queries that weigh keys alike, ``order`` of ``Summary``: halves of halves.

    Each group is cut at the median along the direction in which its queries differ most, as keys with this ``spread``
    tell them apart. Equal groups can be attended from in one batched product.
    """
    heads, queries, _ = sizes(query)
    padded = view_size(queries, views) * views
    alike = query.new_zeros(heads, queries)
    counted = torch.ones_like(alike, dtype=torch.bool) if asked is None else asked
    features = features_of(query, alike.masked_fill(~counted, float("-inf")), spread, asked)
    features = F.pad(features, (0, 0, 0, padded - queries))
    counted = F.pad(counted, (0, padded - queries))
    order = counted_first(counted)
    parts = 1
    while parts < views:
        some = take(features, order).reshape(heads * parts, padded // parts, -1)
        real = counted.gather(1, order).reshape(heads * parts, -1)
        place = _along(some, real).masked_fill(~real, float("inf")).argsort(dim=1, stable=True)
        order = order.reshape(heads * parts, -1).gather(1, place).reshape(heads, -1)
        parts *= 2
    return order.reshape(heads, views, -1)


def _along(features: Tensor, real: Tensor) -> Tensor:
    """How far each row of ``(G, n, r)`` is along the direction of most variance of the real ones, which come first."""
    some, weight = features, real[..., None].to(features.dtype)
    size = plain(features.shape[1])
    if (most := sample_size(size, LOOKED_AT)) < size:
        places = golden_places(real.sum(1, keepdim=True), most)
        some, weight = take(features, places), take(weight, places)
    centred = (some - (some * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)) * weight
    farthest = centred.square().sum(-1).argmax(1)
    direction = take(centred, farthest[:, None])
    for _ in range(TURNS):
        direction = (direction @ centred.mT) @ centred
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(direction.dtype).tiny)
    return (features @ direction.mT)[..., 0]


def view_means(rows: Tensor, order: Tensor, queries: int, asked: Tensor | None) -> Tensor:
    """Mean of the queries of each view that count, ``(G, V, d)``; 0 where there are none."""
    counted = order < queries
    if asked is not None:
        counted &= in_order(asked[..., None], order)[..., 0]
    weight = counted[..., None].to(rows.dtype)
    return (rows * weight).sum(2) / weight.sum(2).clamp_min(1)


def in_order(tokens: Tensor, order: Tensor) -> Tensor:
    """``(G, Nq, ·)`` as ``(G, V, m, ·)``; the last token where there is none."""
    return take(tokens, order.flatten(1).clamp_max(tokens.shape[1] - 1)).reshape(*order.shape, -1)


def view_size(queries: int, views: int) -> int:
    """Queries of a view, the last ones filled up."""
    return -(-queries // views)


def hide(pull: Tensor, seen: Tensor | None) -> Tensor:
    """-inf in the place of what does not count."""
    return pull if seen is None else pull.masked_fill(~seen[:, None], float("-inf"))


def lowest(like: Tensor) -> float:
    """A stand-in for -inf that stays finite when a logit is added."""
    return torch.finfo(like.dtype).min / 4


def summary_products(
    queries: int, keys: int, count: int, *, steps: int, views: int, head_dim: int, value_dim: int
) -> int:
    """Multiply-adds of ``summarise`` for ``count`` clusters, for one head: its matmuls and ``summed``."""
    asked, seen, channels = sample_size(queries), sample_size(keys), assignment_channels(head_dim)
    products = (2 * asked + keys + views * count) * head_dim
    if steps:
        products += 2 * seen * head_dim + steps * keys * count * channels
    if views > 1:
        products += (2 * seen + 2 * asked + views * keys) * head_dim
        rows, parts = view_size(queries, views) * views, 1
        while parts < views:
            size = rows // parts
            products += parts * (size + 2 * TURNS * sample_size(size, LOOKED_AT)) * channels
            parts *= 2
    return products + summed(queries, keys, steps=steps, views=views, head_dim=head_dim, value_dim=value_dim)


def summed(queries: int, keys: int, *, steps: int, views: int, head_dim: int, value_dim: int) -> int:
    """Numbers that are weighted and added to the mean of a cluster or a view: no matmuls, so no counter sees them."""
    means = steps * keys * assignment_channels(head_dim) + views * keys * (head_dim + value_dim)
    return means + (queries * head_dim if views > 1 else 0)
