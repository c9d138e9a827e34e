"""Clusters of the keys of each head, as an average query tells them apart; see ``near_far``."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

# Elements of the tensors that a CPU is given to work on at a time, so that they stay in its cache.
BLOCK = 2**19
# Tokens whose mean and spread stand for those of all.
SAMPLE = 512


@dataclass(frozen=True)
class Clusters:
    """A partition of the ``n`` keys of ``G`` heads into at most ``c`` clusters.

    Attributes:
        assign: ``(G, n)``, int64: the cluster of each key.
        weight: ``(G, n)``: ``exp(u_j - top)`` of each key, in (0, 1]; 0 for a key that is not seen.
        top: ``(G, c)``: largest ``u_j`` in each cluster.
        mass: ``(G, c)``: sum of the weights in each cluster; 0 if it is empty, else at least 1.
        key: ``(G, c, d)``: weighted mean of the keys.
        value: ``(G, c, dv)``: weighted mean of the values.
    """

    assign: Tensor
    weight: Tensor
    top: Tensor
    mass: Tensor
    key: Tensor
    value: Tensor


def block_size(like: Tensor) -> int:
    """Elements of a tensor to work on at a time; other devices than a CPU want more, and compiled code fewer loops."""
    return BLOCK if like.device.type == "cpu" and not torch.compiler.is_compiling() else 64 * BLOCK


def cell_counts(grid: tuple[int, int], clusters: int) -> tuple[int, int]:
    """Rows and columns of nearly square cells, at most ``clusters`` of them and none empty, that divide a grid."""
    height, width = grid
    rows = max(1, min(height, clusters, int(sqrt(clusters * height / width))))
    columns = min(width, clusters // rows)
    return min(height, clusters // columns), columns


def grid_cells(grid: tuple[int, int], clusters: int, device: torch.device) -> Tensor:
    """Number of the cell that each token of a grid lies in, ``(h·w,)``, row by row."""
    rows, columns = cell_counts(grid, clusters)
    row = torch.arange(grid[0], device=device) * rows // grid[0]
    column = torch.arange(grid[1], device=device) * columns // grid[1]
    return (row[:, None] * columns + column).flatten()


def cluster_products(queries: int, keys: int, count: int, steps: int, head_dim: int) -> int:
    """Multiply-adds of the matmuls in ``moments``, ``cluster`` and the bias of its clusters, for one head."""
    asked, seen = len(_sample(queries)), len(_sample(keys))
    products = (2 * asked + keys + count) * head_dim  # moments, u_j, and <centre, key> of clusters
    if steps:
        products += 2 * seen * head_dim + steps * keys * count * assignment_channels(head_dim)
    return products


def _sample(tokens: int) -> range:
    return range(0, tokens, max(1, tokens // SAMPLE))


def assignment_channels(head_dim: int) -> int:
    """Number of channels that the distance between keys and centroids is taken in."""
    return min(head_dim, max(16, head_dim // 4))


def moments(tokens: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, ``(G, 1, d)``, of ``(G, n, d)``; ``counted`` is bool ``(G, n)``, None for all.

    From about ``SAMPLE`` tokens in equal steps where there are more.
    """
    some = tokens[:, :: _sample(tokens.shape[1]).step]
    if counted is None:
        weight = some.new_full((len(some), 1, some.shape[1]), 1 / some.shape[1])
    else:
        weight = counted[:, None, :: _sample(tokens.shape[1]).step].to(some.dtype)
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1)
    return _moments(some, weight)


def _moments(tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    mean = weight @ tokens
    return mean, (weight @ (tokens - mean).square()).sqrt()


def cluster(
    key: Tensor,
    value: Tensor,
    centre: Tensor,
    spread: Tensor,
    *,
    grid: tuple[int, int],
    clusters: int,
    steps: int,
    seen: Tensor | None = None,
) -> Clusters:
    """Cluster keys: cells of the grid, then steps of k-means.

    A key weighs ``exp(u_j)``, ``u_j = <centre, k_j>``: as much as the mean query attends to it. Distance is
    ``sum_ch spread_ch²·(k_ch - c_ch)²``, the mean square error of the logits were the channels of the queries
    uncorrelated, over the channels where it varies most.

    Args:
        key: ``(G, n, d)``; ``n`` is ``h·w``.
        value: ``(G, n, dv)``.
        centre: ``(G, 1, d)``, mean of the queries times the scale of the logits.
        spread: ``(G, 1, d)``, standard deviation of the queries' channels.
        grid: ``(h, w)`` of the keys; ``(n, 1)`` for a sequence.
        clusters: Largest number of clusters.
        steps: Steps of k-means; without any, the clusters are the cells.
        seen: bool ``(G, n)``, True where a key counts; None if all do.
    """
    pull = (key @ centre.mT).squeeze(-1)
    if seen is not None:
        pull = pull.masked_fill(~seen, float("-inf"))
    rows, columns = cell_counts(grid, clusters)
    count = rows * columns
    assign = grid_cells(grid, clusters, key.device).expand(key.shape[:2])
    with torch.no_grad():
        if steps:
            features = _features(key, pull, spread)
        for _ in range(steps):
            weight, _, mass = _weigh(pull, assign, count)
            means = _sums(weight[..., None] * features, assign, count) / _divisor(mass)
            assign = _nearest(features, means, mass)
    weight, top, mass = _weigh(pull, assign, count)
    share = weight[..., None]
    return Clusters(
        assign=assign,
        weight=weight,
        top=top,
        mass=mass,
        key=_sums(share * key, assign, count) / _divisor(mass),
        value=_sums(share * value, assign, count) / _divisor(mass),
    )


def sums_by(index: Tensor, values: Tensor, bins: int) -> Tensor:
    """Sums of the values that share an index, ``(bins, ...)``, in an order that is always the same."""
    sums = values.new_zeros(bins, *values.shape[1:])
    if values.device.type == "cpu":
        return sums.index_add(0, index, values)
    return sums.index_put((index,), values, accumulate=True)  # CUDA sorts the indices; its index_add uses atomics


def _sums(values: Tensor, assign: Tensor, count: int) -> Tensor:
    """``(G, n, ...)`` to ``(G, count, ...)``."""
    heads = len(values)
    index = assign + count * torch.arange(heads, device=assign.device)[:, None]
    return sums_by(index.flatten(), values.flatten(0, 1), heads * count).reshape(heads, count, *values.shape[2:])


def _weigh(pull: Tensor, assign: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``weight``, ``top`` and ``mass`` of ``Clusters``; relative to each cluster's own top, nothing underflows."""
    floor = pull.new_full((len(pull), count), torch.finfo(pull.dtype).min)
    top = floor.scatter_reduce(1, assign, pull.detach(), "amax")
    weight = (pull - top.gather(1, assign)).exp()
    return weight, top, _sums(weight, assign, count)


def _divisor(mass: Tensor) -> Tensor:
    return mass.masked_fill(mass == 0, 1)[..., None]


def _features(key: Tensor, pull: Tensor, spread: Tensor) -> Tensor:
    """The channels of the keys that move the logits most, times how far queries differ there, ``(G, n, r)``."""
    step = _sample(key.shape[1]).step
    weight = pull[:, ::step].softmax(-1).nan_to_num(0)[:, None]
    size = _moments(key[:, ::step], weight)[1] * spread
    channels = size.topk(assignment_channels(key.shape[-1]), dim=-1).indices
    return key.gather(2, channels.expand(-1, key.shape[1], -1)) * spread.gather(2, channels)


def _nearest(features: Tensor, means: Tensor, mass: Tensor) -> Tensor:
    """The cluster with the nearest mean, ``(G, n)``; never one that is empty."""
    offset = (-0.5 * means.square().sum(-1)).masked_fill(mass == 0, torch.finfo(means.dtype).min)[..., None]
    heads, count, _ = offset.shape
    columns = max(1, block_size(features) // (heads * count))
    blocks = torch.split(features, columns, dim=1)
    return torch.cat([_largest(torch.baddbmm(offset, means, block.mT)) for block in blocks], dim=1)


def _largest(scores: Tensor) -> Tensor:
    """``(G, c, n)`` to the first index of the largest along ``c``: a ``max`` that a CPU does for many ``n`` at once."""
    lines = scores.mT[:, :, None]
    return F.max_pool2d(lines, (1, scores.shape[1]), return_indices=True)[1].flatten(1)
