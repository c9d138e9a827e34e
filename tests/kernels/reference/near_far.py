"""near_far by its definition: the list of keys and clusters that each query sees, one query at a time."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from reference.common import widen


def near_far_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    assign: Tensor,
    view: Tensor | None = None,
    prefix: int = 0,
    grid: tuple[int, int] | None = None,
    window: int = 8,
    halo: int = 2,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax over the prefix, the keys of the query's region and the clusters of the other keys.

    With ``q̄`` the mean query of a view, a cluster ``C`` has for the queries of that view the key ``c``, the mean of its
    ``k_j``, and the value that is the mean of its ``v_j``, both weighted with ``exp(scale·<q̄, k_j>)``. Its logit is
    ``scale·<q, c>`` plus the logarithm of the sum of ``exp(scale·<q̄, k_j - c>)`` over its members. The share of this
    sum that is left to it outside the region is taken to be that of the mean of all queries.

    Args:
        query: ``(B, H, n, d)``, the queries behind the prefix: query ``i`` is key ``prefix + i``. Any other number of
            queries is cross-attention, without regions.
        key: ``(B, H, prefix + n, d)``.
        value: ``(B, H, prefix + n, dv)``.
        scale: Factor on the logits.
        assign: ``(B, H, n)``: the cluster of each key behind the prefix.
        view: ``(B, H, Nq)``: the view of each query; None if all have the same.
        prefix: Number of leading keys that every query sees.
        grid: ``(h, w)`` of the keys behind the prefix, or None for a sequence.
        window: Side of a window; 0 for no regions.
        halo: Tokens that a region reaches beyond its window.
        mask: bool ``(B, prefix + n)``, True where a key may be attended to.
        bias: Broadcast to ``(B, H, Nq, prefix + n)``: added to the logit of each single key; a cluster gets the mean
            over its members, weighted with ``exp(scale·<q̄, k_j>)`` for ``q̄`` the mean of all queries.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    shape = (*query.shape[:3], key.shape[2])
    added = torch.zeros(shape, dtype=widen(query).dtype) if bias is None else widen(bias).expand(shape)
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=widen(query).dtype)
    regions = [region(i, grid, key.shape[2] - prefix, window, halo) for i in range(query.shape[2])]
    for sample in range(len(query)):
        seen = torch.ones(key.shape[2], dtype=torch.bool) if mask is None else mask[sample]
        paired = query.shape[2] == key.shape[2] - prefix
        for head in range(query.shape[1]):
            q, k, v = (scale * widen(query[sample, head]), widen(key[sample, head]), widen(value[sample, head]))
            counts = seen[prefix:] if paired else torch.ones(len(q), dtype=torch.bool)
            views = torch.zeros(len(q), dtype=torch.long) if view is None else view[sample, head]
            centre = _mean(q[counts])
            centres = [_mean(q[counts & (views == g)]) for g in range(int(views.max()) + 1)]
            clusters = {
                c: [j for j in range(len(k) - prefix) if assign[sample, head, j] == c and seen[prefix + j]]
                for c in set(assign[sample, head].tolist())
            }
            for i in range(len(q)):
                near = regions[i] if window and paired else set()
                b = added[sample, head, i]
                items = [
                    (q[i] @ k[j] + b[j], v[j]) for j in range(len(k)) if seen[j] and (j < prefix or j - prefix in near)
                ]
                for inside in clusters.values():
                    outside = torch.tensor([j not in near for j in inside])
                    if outside.any():
                        members = [prefix + j for j in inside]
                        logit, shown = summary(q[i], centres[views[i]], k[members], v[members])
                        weights = (k[members] @ centre).softmax(0)
                        items.append((logit + weights[outside].sum().log() + weights @ b[members], shown))
                if items:
                    weights = torch.stack([logit for logit, _ in items]).softmax(0)
                    out[sample, head, i] = weights @ torch.stack([one for _, one in items])
    return out.to(query.dtype)


def _mean(queries: Tensor) -> Tensor:
    return queries.sum(0) / max(len(queries), 1)


def summary(query: Tensor, centre: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Logit and value of a cluster with these members for a query, expanded around a centre."""
    weights = (key @ centre).softmax(0)
    mean = weights @ key
    return query @ mean + ((key - mean) @ centre).logsumexp(0), weights @ value


def region(token: int, grid: tuple[int, int] | None, tokens: int, window: int, halo: int) -> set[int]:
    """The tokens of the window of ``token`` and of the halo around it.

    A side of ``n`` tokens is cut into as few windows of at most ``window`` as will do, all of the same size but for the
    last. A sequence is cut into windows of ``window²`` with halos of ``2·halo·(window + halo)``, so
    that regions hold ``(window + 2·halo)²`` as they do on a grid.
    """
    if not window:
        return set()
    sides = (
        [(grid[0], window, halo), (grid[1], window, halo)]
        if grid
        else [(tokens, window**2, 2 * halo * (window + halo))]
    )
    place = divmod(token, grid[1]) if grid else (token,)
    spans = []
    for position, (length, side, around) in zip(place, sides, strict=True):
        size = ceil(length / ceil(length / side))
        start = position // size * size
        spans.append(range(max(start - around, 0), min(start + size + around, length)))
    if grid is None:
        return set(spans[0])
    return {row * grid[1] + column for row in spans[0] for column in spans[1]}


def assign_reference(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    grid: tuple[int, int] | None = None,
    cells: tuple[int, int],
    channels: int,
    steps: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Cells of the grid, then steps of k-means.

    The key ``k_j`` weighs ``exp(scale·<q̄, k_j>)``. The squared distance of a key to the mean of a cluster is the sum of
    ``var(q_ch)·(k_ch - c_ch)²`` over the ``channels`` where the variances of queries and weighted keys have the largest
    product. All tokens enter the means and variances; the kernel does the same below 1024 tokens.

    Args:
        query: ``(B, H, Nq, d)``.
        key: ``(B, H, n, d)``, without prefix.
        scale: Factor on the logits.
        grid: ``(h, w)`` of the keys, None for a sequence.
        cells: Number of cells along each side of the grid, ``(n, 1)`` for a sequence.
        channels: Number of channels that distances are taken in.
        steps: Steps of k-means.
        mask: bool ``(B, n)``, True where a key counts.

    Returns:
        ``(B, H, n)``, int64. Keys that are masked belong to some cluster, too.
    """
    tokens = key.shape[2]
    height, width = grid or (tokens, 1)
    first = [j // width * cells[0] // height * cells[1] + j % width * cells[1] // width for j in range(tokens)]
    assign = torch.tensor(first).repeat(*key.shape[:2], 1)
    for sample in range(len(key)):
        seen = torch.ones(tokens, dtype=torch.bool) if mask is None else mask[sample]
        if not seen.any():
            continue
        for head in range(key.shape[1]):
            q, k = widen(query[sample, head]), widen(key[sample, head])
            q = q[seen] if len(q) == tokens else q
            deviation = q.std(0, correction=0)
            weights = (scale * k[seen] @ q.mean(0)).softmax(0)
            spread = (weights @ (k[seen] - weights @ k[seen]) ** 2).sqrt() * deviation
            chosen = spread.argsort(descending=True)[:channels]
            points = (k * deviation)[:, chosen]
            for _ in range(steps):
                means = {}
                for c in set(assign[sample, head].tolist()):
                    inside = (assign[sample, head] == c) & seen
                    if inside.any():
                        means[c] = (scale * k[inside] @ q.mean(0)).softmax(0) @ points[inside]
                distances = torch.stack([((points - mean) ** 2).sum(-1) for mean in means.values()])
                assign[sample, head] = torch.tensor(list(means))[distances.argmin(0)]
    return assign


def views_reference(
    query: Tensor, key: Tensor, *, views: int, channels: int, turns: int, mask: Tensor | None = None
) -> Tensor:
    """Halves of halves: each group of queries is cut at the median along the direction in which they differ most.

    Queries are compared on the ``channels`` where the variances of queries and keys have the largest product, each
    weighted with the standard deviation of the keys. The direction is that of the query farthest from the group's mean
    after ``turns`` steps of power iteration; the kernel takes it from all queries of a group below 128.

    Args:
        query: ``(B, H, Nq, d)``.
        key: ``(B, H, n, d)``, without prefix.
        views: Number of groups, a power of two.
        channels: Number of channels.
        turns: Steps of power iteration.
        mask: bool ``(B, n)``, True where a key, and in self-attention the query, counts.

    Returns:
        ``(B, H, Nq)``, int64: the group of each query; those that do not count come last.
    """
    count = query.shape[2]
    out = torch.zeros(*query.shape[:3], dtype=torch.long)
    size = -(-count // views)
    for sample in range(len(query)):
        seen = torch.ones(key.shape[2], dtype=torch.bool) if mask is None else mask[sample]
        counts = seen if count == key.shape[2] else torch.ones(count, dtype=torch.bool)
        if not counts.any():
            continue
        for head in range(query.shape[1]):
            q, k = widen(query[sample, head]), widen(key[sample, head])
            chosen = (q[counts].std(0, correction=0) * k[seen].std(0, correction=0)).argsort(descending=True)[:channels]
            points = (q * k[seen].std(0, correction=0))[:, chosen]
            groups = [list(range(size * views))]
            while len(groups) < views:
                groups = [half for group in groups for half in _halves(group, points, counts, turns)]
            for number, group in enumerate(groups):
                out[sample, head, [i for i in group if i < count]] = number
    return out


def _halves(group: list[int], points: Tensor, counts: Tensor, turns: int) -> tuple[list[int], list[int]]:
    real = [i for i in group if i < len(points) and counts[i]]
    if real:
        centred = points[real] - points[real].mean(0)
        direction = centred[centred.square().sum(1).argmax()]
        for _ in range(turns):
            direction = centred.T @ (centred @ direction)
            direction = direction / direction.norm().clamp_min(1e-300)
        real.sort(key=lambda i: float(points[i] @ direction))
    ordered = real + [i for i in group if i not in set(real)]
    return ordered[: len(group) // 2], ordered[len(group) // 2 :]
