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
    line = torch.arange(count * size, device=key.device)
    hidden = (line >= tokens)[None] if real is None else ~F.pad(real, (0, count * size - tokens))
    hidden, order = hidden.expand(heads, -1), line.expand(heads, -1)
    parts = 1
    while parts < count:
        some = take(features, order).view(heads * parts, -1, features.shape[2])
        along = (some * _direction(some)).sum(-1)
        along = along.masked_fill(hidden.gather(1, order).view_as(along), float("inf"))
        order = order.reshape(heads * parts, -1).gather(1, along.argsort(dim=1)).view(heads, -1)
        parts *= 2
    return order.view(heads, count, size)


def _features(query: Tensor, key: Tensor) -> Tensor:
    """What tells keys apart, ``(G, N, c)``: the distance of two keys is how differently queries look at them."""
    (_, spread), (mean, own) = _moments(query), _moments(key)
    chosen = (own * spread).topk(min(CHANNELS, key.shape[2]), dim=-1).indices
    centred = key.gather(2, chosen.expand(-1, key.shape[1], -1)) - mean.gather(2, chosen)
    return centred * spread.gather(2, chosen)


def _moments(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of some of the tokens, ``(G, 1, d)`` each."""
    most = sample_size(tokens.shape[1], SAMPLE)
    places = golden_places(torch.full((1, 1), tokens.shape[1], device=tokens.device), most)
    some = take(tokens, places.expand(tokens.shape[0], -1))
    mean = some.mean(1, keepdim=True)
    return mean, (some - mean).square().mean(1, keepdim=True).sqrt()  # twenty times as fast as torch.std


def _direction(features: Tensor) -> Tensor:
    """Direction in which rows of ``(P, n, c)`` differ most, nearly, ``(P, 1, c)``, from some of them.

    Four turns of power iteration, in two with the square of the covariance.
    """
    if features.shape[1] > LOOKED_AT:
        places = golden_places(torch.full((1, 1), features.shape[1], device=features.device), LOOKED_AT)[0]
        features = features[:, places]
    centred = features - features.mean(1, keepdim=True)
    start = torch.arange(features.shape[1], device=features.device).square().cos().to(features.dtype)
    covariance = centred.mT @ centred
    covariance = covariance / covariance.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_min(1e-30)
    square = covariance @ covariance
    return start[None, None] @ centred @ square @ square


def direction_products(tokens: int, count: int, head_dim: int) -> int:
    """Multiply-adds of the matmuls of ``equal_blocks`` for one head."""
    channels, products, rows, parts = min(CHANNELS, head_dim), 0, -(-tokens // count) * count, 1
    while parts < count:
        seen = min(rows // parts, LOOKED_AT)
        products += parts * channels * ((seen + channels) * channels + seen + 2 * channels)
        parts *= 2
    return products
