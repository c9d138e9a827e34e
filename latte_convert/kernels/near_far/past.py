"""near_far where a query sees only the past: its own window and the one before key by key, what is older in clusters.

A sequence is cut into windows of ``w`` tokens. What lies before the two windows that a query sees exactly is divided as
a binary number is: of ``m`` windows the oldest ``2^l`` make one block, with the largest ``l`` that fits, and so on with
the rest: 13 windows are blocks of 8, 4 and 1. So blocks are large far back and small nearby, there are at most
``log2(N/w)`` of them, and each ends before the query's window begins. Each is summarised once, by clusters of its own
keys, as in ``near_far``: they start as pieces of the block, k-means moves keys between them, and they are expanded
around the mean of the block's own queries, which are past as well. All columns are under one softmax.

All blocks of a query have as many clusters, ``c`` together, so the cost is linear in N: about ``N·(2w + 1.6·c)``
products of a query and a key, and N log N where ``c`` grows with the number of blocks. Every operator is one that graph
formats have, and the number of tokens decides all shapes, so this form is the one that is exported, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.graphs import plain, sizes
from latte_convert.kernels.near_far.clustering import assignment_channels, features_of, grid_cells, moments
from latte_convert.kernels.near_far.summary import hide, level_of, lowest, summary_products
from latte_convert.kernels.near_far.whole import membership, nearest_of, products_of_clusters


class Past(NamedTuple):
    """How the past is cut.

    Attributes:
        window: Tokens of a window, ``w``.
        clusters: Clusters that a query sees, at most; its blocks share them.
        steps: Steps of k-means in each block.
    """

    window: int
    clusters: int
    steps: int

    @classmethod
    def of(cls, side: int, clusters: int, steps: int) -> Past:
        """Windows with as many tokens as one of a grid has that is ``side`` wide, one at least."""
        return cls(max(side, 1) ** 2, clusters, steps)

    def windows(self, tokens: int) -> int:
        """Number of windows, the last one filled up."""
        return -(-tokens // self.window)

    def levels(self, tokens: int) -> list[Blocks]:
        """The blocks that some window sees, of one window, two, four and so on."""
        far = self.windows(tokens) - 2  # windows that the last one sees in blocks
        numbers = [((far >> level) + 1) // 2 for level in range(max(far, 0).bit_length())]
        share = max(1, self.clusters // max(1, len(numbers)))
        sizes = [self.window << level for level in range(len(numbers))]
        return [Blocks(*each, min(share, each[2])) for each in zip(range(len(numbers)), numbers, sizes, strict=True)]


class Blocks(NamedTuple):
    """Blocks of ``2^level`` windows: every other one, as the ones between are in larger blocks for all that see them.

    Attributes:
        level: Binary logarithm of their windows.
        number: How many there are.
        size: Their tokens.
        clusters: Clusters of each.
    """

    level: int
    number: int
    size: int
    clusters: int

    def seen_by(self, windows: int, device: torch.device) -> Tensor:
        """Number of the block that each window sees, ``(windows,)``; ``number``, one too many, where it sees none."""
        far = (torch.arange(windows, device=device) - 1).clamp_min(0) >> self.level
        return torch.where(far % 2 == 1, far // 2, self.number)

    def of(self, tokens: Tensor) -> Tensor:
        """Their tokens, ``(G·number, size, ·)`` of ``(G, N, ·)``."""
        pairs = 2 * self.size * self.number
        filled = F.pad(tokens, (0, 0, 0, max(pairs - plain(tokens.shape[1]), 0)))[:, :pairs]
        return torch.unflatten(filled, 1, (self.number, 2, self.size))[:, :, 0].flatten(0, 1)


def attend_past(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float, past: Past) -> Tensor:
    """Causal attention: query ``i`` sees key ``i`` and those before it.

    Args:
        query: ``(G, N, d)``.
        key: ``(G, N, d)``.
        value: ``(G, N, dv)``.
        seen: bool ``(G, N)``, True where a key may be attended to; None if all may.
        scale: Factor on the logits.
        past: How the past is cut.

    Returns:
        ``(G, N, dv)``; something finite where a query sees no key.
    """
    _, tokens, dim = sizes(query)
    windows, window = past.windows(tokens), past.window
    rest = windows * window - tokens
    query, key, value = (F.pad(x, (0, 0, 0, rest)) for x in (query, key, value))
    seen = None if seen is None else F.pad(seen, (0, rest))
    rows = torch.cat([key, value], dim=-1)
    own = torch.unflatten(rows, 1, (windows, window))
    columns, levels = [_window_before(own), own], [_near_levels(key, seen, windows, window)]
    for blocks in past.levels(tokens):
        shown, level = _summary(query, rows, seen, scale, blocks, past.steps)
        at = blocks.seen_by(windows, key.device)
        columns.append(F.pad(shown, (0, 0, 0, 0, 0, 1)).index_select(1, at))
        level = F.pad(level, (0, 0, 0, 1), value=lowest(key)).index_select(1, at)
        levels.append(level[:, :, None].expand(-1, -1, window, -1))
    beside, added = torch.cat(columns, dim=2).flatten(0, 1), torch.cat(levels, dim=3).flatten(0, 1)
    asked = torch.unflatten(query, 1, (windows, window)).flatten(0, 1)
    logits = torch.baddbmm(added, asked, beside[..., :dim].mT, alpha=scale)
    out = logits.softmax(-1) @ beside[..., dim:]
    return torch.unflatten(out, 0, (-1, windows)).flatten(1, 2)[:, :tokens]


def _window_before(own: Tensor) -> Tensor:
    """The window before each of ``(G, windows, w, ·)``; zeros before the first."""
    return F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1]


def _near_levels(key: Tensor, seen: Tensor | None, windows: int, window: int) -> Tensor:
    """0 where a query sees a key of its window or the one before, else the lowest: ``(G, windows, w, 2w)``."""
    place = torch.arange(2 * window, device=key.device)
    visible = (place <= place[window:, None]).expand(windows, -1, -1)
    first = torch.arange(windows, device=key.device)[:, None, None] == 0
    visible = (visible & ~(first & (place < window))).expand(len(key), -1, -1, -1)
    if seen is not None:
        counted = torch.unflatten(seen, 1, (windows, window))[..., None]
        visible = visible & torch.cat([_window_before(counted), counted], dim=2).mT
    return key.new_zeros(()).masked_fill(~visible, lowest(key))


def _summary(
    query: Tensor, rows: Tensor, seen: Tensor | None, scale: float, blocks: Blocks, steps: int
) -> tuple[Tensor, Tensor]:
    """Clusters of each block: keys and values ``(G, blocks, c, d + dv)``, and their level ``(G, blocks, c)``."""
    asked, members = blocks.of(query), blocks.of(rows)
    counted = None if seen is None else blocks.of(seen[..., None])[..., 0]
    key, count = members[..., : query.shape[2]], blocks.clusters
    mean, spread = moments(asked, counted)
    pull = hide(scale * mean @ key.mT, counted)
    assign = grid_cells((blocks.size, 1), count, key.device).expand(len(key), -1)
    features = features_of(key, pull[:, 0], spread, counted) if steps else key
    for _ in range(steps):
        means, _, mass = products_of_clusters(features, pull, membership(assign, count), assign)
        assign = nearest_of(features, means[:, 0], mass[:, 0])
    shown, top, mass = products_of_clusters(members, pull, membership(assign, count), assign)
    level = level_of(mass, top, shown[..., : query.shape[2]], mean, scale)
    shape = (-1, blocks.number)
    return torch.unflatten(shown[:, 0], 0, shape), torch.unflatten(level[:, 0], 0, shape)


def past_products(tokens: int, past: Past, *, head_dim: int, value_dim: int) -> int:
    """Multiply-adds of ``attend_past`` for one head."""
    both, products, columns = head_dim + value_dim, 0, 2 * past.window
    for blocks in past.levels(tokens):
        columns += blocks.clusters
        size, count = blocks.size, blocks.clusters
        own = summary_products(size, size, count, steps=past.steps, views=1, head_dim=head_dim, value_dim=value_dim)
        channels = past.steps * assignment_channels(head_dim)
        products += blocks.number * (own + size * count * (both + channels))  # sums over members are products here
    return products + past.windows(tokens) * past.window * columns * both
