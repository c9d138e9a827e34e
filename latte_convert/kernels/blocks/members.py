"""Blocks of equal size whose keys are alike: halves of halves of the keys of a head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.kernels.near_far.clustering import golden_places, sample_size, take

CHANNELS = 32
"""Channels in which keys are compared, the ones where they differ most."""
SAMPLE = 512
"""Tokens whose spread stands for that of all."""
LOOKED_AT = 64
"""Keys of a part that tell the direction in which it is cut."""
TURNS = 3
"""Steps of the power iteration that finds it."""


@torch.no_grad()
def equal_blocks(query: Tensor, key: Tensor, count: int, real: Tensor | None = None) -> Tensor:
    """Members of ``count`` blocks of equal size, ``(G, count, m)``, int64; numbers from N on stand for no key.

    A part of the keys is cut in two at the median along the direction in which they differ most, again and again.
    Keys differ by what tells their logits apart: channels count as much as queries vary in them.

    Args:
        query: ``(G, Nq, d)``.
        key: ``(G, N, d)``.
        count: Number of blocks, a power of two.
        real: bool ``(G or 1, N)``, True where a key counts; None if all do. The others come last in their parts.
    """
    heads, tokens, _ = key.shape
    size = -(-tokens // count)
    features = F.pad(_features(query, key), (0, 0, 0, count * size - tokens))
    counts = torch.arange(count * size, device=key.device) < tokens
    if real is not None:
        counts = counts & F.pad(real, (0, count * size - tokens))
    counts = counts.expand(heads, -1)
    order = torch.arange(count * size, device=key.device).expand(heads, -1)
    parts = 1
    while parts < count:
        some = take(features, order).reshape(heads * parts, count * size // parts, -1)
        inside = counts.gather(1, order).reshape(heads * parts, -1)
        place = _along(some, inside).masked_fill(~inside, float("inf")).argsort(dim=1, stable=True)
        order = order.reshape(heads * parts, -1).gather(1, place).reshape(heads, -1)
        parts *= 2
    return order.reshape(heads, count, size)


def _features(query: Tensor, key: Tensor) -> Tensor:
    """What tells keys apart, ``(G, N, c)``: the distance of two keys is how differently queries look at them."""
    samples = []
    for tokens in (query, key):
        count = torch.full((1, 1), tokens.shape[1], device=tokens.device)
        some = golden_places(count, sample_size(tokens.shape[1], SAMPLE)).expand(len(tokens), -1)
        samples.append(take(tokens, some))
    spread = samples[0].std(1, keepdim=True, correction=0)
    varies = samples[1].std(1, keepdim=True, correction=0) * spread
    chosen = varies.topk(min(CHANNELS, key.shape[2]), dim=-1).indices
    centred = key.gather(2, chosen.expand(-1, key.shape[1], -1)) - samples[1].mean(1, keepdim=True).gather(2, chosen)
    return centred * spread.gather(2, chosen)


def _along(features: Tensor, real: Tensor) -> Tensor:
    """How far each row of ``(P, n, c)`` is along the direction of most variance of some of them."""
    some, weight = features, real[..., None].to(features.dtype)
    if features.shape[1] > LOOKED_AT:
        count = torch.full((1, 1), features.shape[1], device=features.device)
        places = golden_places(count, LOOKED_AT)[0]
        some, weight = features[:, places], weight[:, places]
    centred = (some - (some * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)) * weight
    direction = take(centred, centred.square().sum(-1).argmax(1)[:, None])
    for _ in range(TURNS):
        direction = (direction @ centred.mT) @ centred
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(direction.dtype).tiny)
    return (features @ direction.mT)[..., 0]


def block_products(tokens: int, count: int, head_dim: int) -> int:
    """Multiply-adds of the matmuls of ``equal_blocks`` for one head."""
    channels, products, rows, parts = min(CHANNELS, head_dim), 0, -(-tokens // count) * count, 1
    while parts < count:
        size = rows // parts
        products += parts * (size + 2 * TURNS * min(size, LOOKED_AT)) * channels
        parts *= 2
    return products
