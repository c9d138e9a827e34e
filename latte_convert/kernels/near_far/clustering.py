"""k-means on the tokens of each head, and what it needs; see ``near_far``."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.graphs import plain, sizes

# Elements of the tensors that a CPU is given to work on at a time, so that they stay in its cache.
BLOCK = 2**19
# Tokens whose mean and spread stand for those of all, where there are twice as many or more.
SAMPLE = 512
GOLDEN = (5**0.5 - 1) / 2


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


def sample_size(tokens: int, most: int = SAMPLE) -> int:
    """Number of tokens that stand for all: ``most`` where there are twice as many or more, else all."""
    return tokens if tokens < 2 * most else most


def golden_places(counts: Tensor, most: int) -> Tensor:
    """``most`` places among the first ``counts``, ``(G, 1)``, as evenly as can be: ``(G, most)``.

    Multiples of the golden ratio: equal steps would see only a few columns of a grid whose width they have in common.
    """
    shares = torch.arange(most, device=counts.device) * GOLDEN % 1
    return (shares * counts).long()


def take(tokens: Tensor, places: Tensor) -> Tensor:
    """``(G, n, d)`` at places ``(G, s)``: ``(G, s, d)``."""
    start = tokens.shape[1] * torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    return tokens.flatten(0, 1).index_select(0, (places + start).flatten()).reshape(*places.shape, -1)


def counted_first(counted: Tensor) -> Tensor:
    """Places of the tokens that count, bool ``(G, n)``, then those of the others, each in their order: ``(G, n)``."""
    return counted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)


def sample_places(tokens: Tensor, counted: Tensor | None) -> Tensor | None:
    """Places of the tokens that stand for all that count, ``(G, SAMPLE)``; None: all of them do."""
    heads, size, _ = sizes(tokens)
    if sample_size(size) == size:
        return None
    if counted is None:
        return golden_places(torch.full((heads, 1), size, device=tokens.device), SAMPLE)
    return counted_first(counted).gather(1, golden_places(counted.sum(1, keepdim=True), SAMPLE))


def assignment_channels(head_dim: int) -> int:
    """Number of channels that the distance between keys and centroids is taken in."""
    return min(head_dim, max(16, head_dim // 4))


def moments(tokens: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, ``(G, 1, d)``, of ``(G, n, d)``; ``counted`` is bool ``(G, n)``, None for all.

    From ``SAMPLE`` tokens where there are at least twice as many.
    """
    weight = tokens.new_ones(*tokens.shape[:2], 1) if counted is None else counted[..., None].to(tokens.dtype)
    places = sample_places(tokens, counted)
    if places is not None:
        tokens, weight = take(tokens, places), take(weight, places)
    return _moments(tokens, (weight / weight.sum(1, keepdim=True).clamp_min(1)).mT)


def _moments(tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    mean = weight @ tokens
    return mean, (weight @ (tokens - mean).square()).sqrt()


def kmeans(features: Tensor, pull: Tensor, assign: Tensor, count: int, steps: int) -> Tensor:
    """Steps of k-means: each token goes to the nearest mean of those that a step before were together.

    Args:
        features: ``(G, n, r)``, from ``features_of``: distances are Euclidean in them.
        pull: ``(G, n)``, logarithm of each token's weight in the means; -inf for one that does not count.
        assign: ``(G, n)``, int64: the cluster that each token begins in.
        count: Number of clusters.
        steps: Number of steps.

    Returns:
        ``(G, n)``, int64; no token is in a cluster that was empty.
    """
    for _ in range(steps):
        means, _, mass = cluster_means(features, pull[:, None], assign, count)
        assign = nearest(features, means[:, 0], mass[:, 0])
    return assign


def cluster_means(tokens: Tensor, pull: Tensor, assign: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means of each cluster's tokens with weights ``exp(pull)``, for ``V`` sets of weights.

    Args:
        tokens: ``(G, n, d)``.
        pull: ``(G, V, n)``; -inf for a token that does not count.
        assign: ``(G, n)``, int64.
        count: Number of clusters.

    Returns:
        Means ``(G, V, count, d)``; and, as ``(G, V, count)``, the largest ``pull`` in each cluster and its mass, the
        sum of the weights relative to that: at least 1, and 0 for a cluster without tokens.
    """
    heads, views, size = pull.shape
    members = assign[:, None].expand(-1, views, -1).reshape(heads * views, size)
    weight, top, mass = weigh(pull.flatten(0, 1), members, count)
    weight = (weight / mass.masked_fill(mass == 0, 1).gather(1, members)).reshape(heads, views, size)
    top, mass = (x.reshape(heads, views, count) for x in (top, mass))
    return sums_of(tokens, weight, Members.of(assign, count)), top, mass


class Members(NamedTuple):
    """The tokens of ``c`` clusters, cluster by cluster.

    Attributes:
        order: ``(G, n)``, int64: the tokens of the first cluster, then those of the second, and so on.
        begins: ``(G, c)``, int64: where each cluster begins in it.
    """

    order: Tensor
    begins: Tensor

    @classmethod
    def of(cls, assign: Tensor, count: int) -> Members:
        """Of the cluster that each token is in, ``(G, n)``."""
        order = assign.argsort(dim=1, stable=True)
        clusters = torch.arange(count, device=assign.device).repeat(len(assign), 1)
        return cls(order, torch.searchsorted(assign.gather(1, order), clusters))


def sums_of(tokens: Tensor, weight: Tensor, members: Members) -> Tensor:
    """Sums of each cluster's tokens, ``(G, n, d)``, with ``V`` sets of weights, ``(G, V, n)``: ``(G, V, c, d)``."""
    (heads, views, size), (order, begins) = weight.shape, members
    head = torch.arange(heads, device=order.device)
    # Bags of rows that are next to each other in the order: sums in one pass, no product of rows and weights stored.
    sums = F.embedding_bag(
        (order + size * head[:, None])[:, None].expand(-1, views, -1).flatten(),
        tokens.flatten(0, 1),
        (begins[:, None] + size * torch.arange(heads * views, device=order.device).reshape(heads, views, 1)).flatten(),
        mode="sum",
        per_sample_weights=weight.gather(2, order[:, None].expand(-1, views, -1)).flatten(),
    )
    return sums.reshape(heads, views, begins.shape[1], -1)


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


def weigh(pull: Tensor, assign: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight of each token, and the largest ``pull`` and the sum of weights of each cluster, of ``(G, n)``.

    Weights are relative to the largest in the token's own cluster: nothing underflows, and the sum is at least 1.
    """
    floor = pull.new_full((len(pull), count), torch.finfo(pull.dtype).min)
    top = floor.scatter_reduce(1, assign, pull.detach(), "amax")
    weight = (pull - top.gather(1, assign)).exp()
    return weight, top, _sums(weight, assign, count)


def features_of(tokens: Tensor, pull: Tensor, spread: Tensor, counted: Tensor | None) -> Tensor:
    """The channels that move the logits most, times the spread of what they are multiplied with, ``(G, n, r)``.

    Args:
        tokens: ``(G, n, d)``, keys or queries.
        pull: ``(G, n)``: logarithm of the weight of each in a standard deviation.
        spread: ``(G, 1, d)``: standard deviation of the queries, or of the keys.
        counted: bool ``(G, n)``, True where a token counts; None if all do.
    """
    some, weight, places = tokens, pull, sample_places(tokens, counted)
    if places is not None:
        some, weight = take(tokens, places), pull.gather(1, places)
    channels = channels_of(some, weight, spread)
    return tokens.gather(2, channels.expand(-1, tokens.shape[1], -1)) * spread.gather(2, channels)


def channels_of(tokens: Tensor, pull: Tensor, spread: Tensor) -> Tensor:
    """The channels of ``features_of``, int64 ``(G, 1, r)``, found from tokens that stand for all."""
    size = _moments(tokens, pull.softmax(-1).nan_to_num(0)[:, None])[1] * spread
    return size.topk(assignment_channels(plain(tokens.shape[-1])), dim=-1).indices


def nearest(features: Tensor, means: Tensor, mass: Tensor) -> Tensor:
    """The cluster with the nearest mean, ``(G, n)``; never one that is empty."""
    offset = (-0.5 * means.square().sum(-1)).masked_fill(mass == 0, torch.finfo(means.dtype).min)[..., None]
    heads, count, _ = sizes(offset)
    columns = max(1, block_size(features) // (heads * count))
    blocks = torch.split(features, columns, dim=1)
    return torch.cat([_largest(torch.baddbmm(offset, means, block.mT)) for block in blocks], dim=1)


def _largest(scores: Tensor) -> Tensor:
    """``(G, c, n)`` to the first index of the largest along ``c``: a ``max`` that a CPU does for many ``n`` at once."""
    lines = scores.mT[:, :, None]
    return F.max_pool2d(lines, (1, scores.shape[1]), return_indices=True)[1].flatten(1)
