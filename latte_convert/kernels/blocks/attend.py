"""Attention to regions, blocks and the prefix, each with its denominators, under one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from latte_convert import compat
from latte_convert.graphs import recorded
from latte_convert.kernels.blocks.members import equal_blocks
from latte_convert.kernels.blocks.windows import Slices
from latte_convert.kernels.near_far.clustering import block_size, take

_FUSED = compat.CPU_ATTENTION.get()


class Tokens(NamedTuple):
    """The tokens of ``G`` heads, laid along the line that windows are slices of, and the prefix.

    Attributes:
        query, key, value: ``(G, halo + W·n + halo, ·)``; places over the ends hold the token at that end.
        level: ``(G or 1, halo + W·n + halo)``: added to logits: the logarithm of how many tokens a key stands for, the
            lowest where there is none.
        first_key, first_value: ``(G, p, ·)``, the prefix.
        first_level: ``(G or 1, p)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    level: Tensor
    first_key: Tensor
    first_value: Tensor
    first_level: Tensor


class Blocks(NamedTuple):
    """The keys of ``G`` heads in ``C`` blocks of ``m``.

    Attributes:
        rows: ``(G, C·m, d + dv)``: keys and values.
        level: ``(G, C·m)``, as that of tokens.
        place: ``(G, halo + W·n + halo)``, int64: row of the token at each place of the line.
        number: C.
    """

    rows: Tensor
    level: Tensor
    place: Tensor
    number: int


class Attended(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        out: ``(G, W, n, dv)``.
        total: ``(G, W, n, 1)``: logarithm of the sum of the exponentials of the logits.
    """

    out: Tensor
    total: Tensor


def lowest(like: Tensor) -> float:
    """A stand-in for -inf that stays finite when a logit is added."""
    return torch.finfo(like.dtype).min / 4


def attend_windows(tokens: Tokens, slices: Slices, count: int, scale: float) -> Tensor:
    """Attention of all windows, ``(G, W·n, dv)``."""
    blocks = make_blocks(tokens, slices, count)
    query, key, value = slices.windows(tokens.query), slices.regions(tokens.key), slices.regions(tokens.value)
    level, place = slices.regions(tokens.level), slices.regions(blocks.place)
    mean = _mean(query, slices.windows(tokens.level))
    parts = []
    for some in _chunks(tokens, blocks, slices):
        far_key, far_value, far_level = summarise(mean[:, some], blocks, place[:, some], tokens.key.shape[2], scale)
        near = attend(query[:, some], key[:, some], value[:, some], level[:, some], scale)
        far = attend(query[:, some], far_key, far_value, far_level, scale)
        parts.append(_mix(near, far, query[:, some], tokens, scale))
    return torch.cat(parts, dim=1).flatten(1, 2)


def make_blocks(tokens: Tokens, slices: Slices, count: int) -> Blocks:
    """Cut the keys into blocks."""
    inner = slice(slices.halo, slices.halo + slices.tokens)
    key, level = tokens.key[:, inner], tokens.level[:, inner]
    hidden = level <= lowest(level) / 2
    members = equal_blocks(tokens.query[:, inner], key, count, ~hidden).flatten(1)
    token = members.clamp_max(slices.tokens - 1)
    rows = torch.cat([take(key, token), take(tokens.value[:, inner], token)], dim=-1)
    added = level.expand(len(key), -1).gather(1, token).masked_fill(members >= slices.tokens, lowest(level))
    line = torch.arange(members.shape[1], device=members.device).expand_as(members)
    place = torch.empty_like(members).scatter(1, members, line)
    return Blocks(rows, added, place[:, slices.places(members.device)[0]], count)


def summarise(
    mean: Tensor, blocks: Blocks, place: Tensor, head_dim: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What each window sees of each block: keys ``(G, W, C, d)``, values ``(G, W, C, dv)`` and levels ``(G, W, C)``.

    Args:
        mean: ``(G, W, d)``, mean query of each window.
        blocks: The blocks.
        place: ``(G, W, r)``, int64: rows of the region of each window, which are left out.
        head_dim: d.
        scale: Factor on the logits.
    """
    heads, windows, _ = mean.shape
    none = lowest(mean)
    logits = torch.baddbmm(blocks.level[..., None], blocks.rows[..., :head_dim], mean.mT, alpha=scale)
    logits = logits.scatter(1, place.mT, none).reshape(heads * blocks.number, -1, windows)
    top = logits.amax(1, keepdim=True)
    weights = (logits - top).exp()
    mass = weights.sum(1, keepdim=True)
    weights = weights / mass
    seen = weights.mT @ blocks.rows.reshape(heads * blocks.number, -1, blocks.rows.shape[2])
    seen = seen.view(heads, blocks.number, windows, -1).transpose(1, 2)
    key, value = seen[..., :head_dim], seen[..., head_dim:]
    level = (top + mass.log()).view(heads, blocks.number, windows).mT
    level = level - scale * (key @ mean[..., None])[..., 0]
    empty = top.view(heads, blocks.number, windows).mT <= none / 2
    return key, value, level.masked_fill(empty, none)


def attend(query: Tensor, key: Tensor, value: Tensor, level: Tensor, scale: float) -> Attended:
    """Softmax attention of ``(G, W, n, d)`` to ``(G, W, c, d)`` with ``(G or 1, W, c)`` added to the logits."""
    added = level[:, :, None]
    if _FUSED is None or not _serves(query, value):
        logits = scale * (query @ key.mT) + added
        weights = logits.softmax(-1)
        return Attended(weights @ value, logits.logsumexp(-1, keepdim=True))
    added = added.expand(len(query), -1, query.shape[2], -1)
    out, total = _FUSED(query, key, value, attn_mask=added, scale=scale)
    return Attended(out, total[..., None])


def _mix(near: Attended, far: Attended, query: Tensor, tokens: Tokens, scale: float) -> Tensor:
    """One softmax over the keys of both and the prefix, ``(G, W, n, dv)``."""
    key, value = tokens.first_key, tokens.first_value
    rows = query.flatten(1, 2)
    logits = torch.baddbmm(tokens.first_level[:, None], rows, key.mT, alpha=scale).view(*query.shape[:3], -1)
    weights = torch.cat([near.total, far.total, logits], dim=-1).softmax(-1)
    out = near.out * weights[..., :1] + far.out * weights[..., 1:2]
    return torch.baddbmm(out.flatten(1, 2), weights[..., 2:].flatten(1, 2), value).view_as(out)


def _mean(query: Tensor, level: Tensor) -> Tensor:
    """Mean of the queries of each window that count, ``(G, W, d)``; 0 where there are none."""
    counted = (level > lowest(level) / 2).to(query.dtype)[..., None]
    return (query * counted).sum(2) / counted.sum(2).clamp_min(1)


def _chunks(tokens: Tokens, blocks: Blocks, slices: Slices) -> Iterator[slice]:
    """Windows to attend from in one go."""
    each = blocks.rows.shape[1] + blocks.number * blocks.rows.shape[2] + slices.size * (blocks.number + slices.region)
    step = max(1, block_size(tokens.key) // (each * len(tokens.key)))
    step = ceil(slices.number / ceil(slices.number / step))
    for first in range(0, slices.number, step):
        yield slice(first, first + step)


def _serves(query: Tensor, value: Tensor) -> bool:
    """Whether the fused attention does: on a CPU, in inference, outside of a compiled graph."""
    eager = not torch.compiler.is_compiling() and not recorded()
    return query.device.type == "cpu" and eager and query.shape[3] == value.shape[3]
