"""Attention to regions, blocks and the prefix, each with its denominators, under one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from latte_convert import compat
from latte_convert.graphs import exporting, recorded
from latte_convert.kernels.blocks.members import equal_blocks
from latte_convert.kernels.blocks.windows import Slices
from latte_convert.kernels.near_far.clustering import block_size, take

_FUSED = compat.CPU_ATTENTION.get()


class Tokens(NamedTuple):
    """The tokens of ``G`` heads, laid along the line that windows are slices of, and the prefix.

    Attributes:
        query: ``(G, halo + W·n + halo, d)``; places over the ends hold the token at that end.
        rows: ``(G, halo + W·n + halo, d + dv)``: keys and values.
        level: ``(G or 1, halo + W·n + halo)``: added to logits: the logarithm of how many tokens a key stands for, the
            lowest where there is none.
        prefix: ``(G, p, d + dv)``: those of the prefix.
        prefix_level: ``(G or 1, p)``.
    """

    query: Tensor
    rows: Tensor
    level: Tensor
    prefix: Tensor
    prefix_level: Tensor


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


class Columns(NamedTuple):
    """Keys that each window of queries attends to.

    Attributes:
        rows: ``(G, W, c, d + dv)``: keys and values.
        level: ``(G or 1, W, c)``: added to their logits.
    """

    rows: Tensor
    level: Tensor


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


def attend_windows(tokens: Tokens, slices: Slices, count: int, opened: int, scale: float) -> Tensor:
    """Attention of all windows, ``(G, W·n, dv)``."""
    blocks = make_blocks(tokens, slices, count)
    query, place = slices.windows(tokens.query), slices.regions(blocks.place)
    regions = Columns(slices.regions(tokens.rows), slices.regions(tokens.level))
    mean = _mean(query, slices.windows(tokens.level))
    parts = []
    for some in _chunks(tokens, blocks, slices, opened):
        near = Columns(*(x[:, some] for x in regions))
        far = look(mean[:, some], blocks, place[:, some], opened, scale)
        parts.append(
            _mix([attend(query[:, some], seen, scale) for seen in (near, *far)], query[:, some], tokens, scale)
        )
    return torch.cat(parts, dim=1).flatten(1, 2)


def make_blocks(tokens: Tokens, slices: Slices, count: int) -> Blocks:
    """Cut the keys into blocks."""
    inner = slice(slices.halo, slices.halo + slices.tokens)
    query, rows, level = tokens.query[:, inner], tokens.rows[:, inner], tokens.level[:, inner]
    members = equal_blocks(query, rows[..., : query.shape[2]], count, level > lowest(level) / 2).flatten(1)
    token = members.clamp_max(slices.tokens - 1)
    added = level.expand(rows.shape[0], -1).gather(1, token).masked_fill(members >= slices.tokens, lowest(level))
    line = torch.arange(members.shape[1], device=members.device).expand_as(members)
    place = torch.empty_like(members).scatter(1, members, line)
    return Blocks(take(rows, token), added, place[:, slices.places(members.device)[0]], count)


def look(mean: Tensor, blocks: Blocks, place: Tensor, opened: int, scale: float) -> list[Columns]:
    """What each window sees of the blocks: the heaviest key by key, then a summary of each of the others.

    Args:
        mean: ``(G, W, d)``, mean query of each window.
        blocks: The blocks.
        place: ``(G, W, r)``, int64: rows of the region of each window, which are left out.
        opened: How many blocks are seen key by key.
        scale: Factor on the logits.
    """
    heads, windows, head_dim = mean.shape
    none = lowest(mean)
    logits = torch.baddbmm(blocks.level[:, None], mean, blocks.rows[..., :head_dim].mT, alpha=scale)
    logits = logits.scatter(2, place, none).view(heads, windows, blocks.number, -1)
    weights = logits.softmax(-1)
    top = logits.amax(-1)
    mass = (top - weights.amax(-1).log()).masked_fill(
        top <= none / 2, none
    )  # log M; exp(top) / M is the largest weight
    members = blocks.rows.view(heads * blocks.number, -1, blocks.rows.shape[2])
    seen = (weights.transpose(1, 2).flatten(0, 1) @ members).view(heads, blocks.number, windows, -1).transpose(1, 2)
    level = mass - scale * (seen[..., :head_dim] * mean[:, :, None]).sum(-1)
    if not opened:
        return [Columns(seen, level)]
    heaviest = mass.topk(opened, dim=-1, sorted=False).indices
    return [_open(heaviest, blocks, logits), Columns(seen, level.scatter(2, heaviest, none))]


def _open(heaviest: Tensor, blocks: Blocks, logits: Tensor) -> Columns:
    """The members of the ``heaviest`` blocks of each window, ``(G, W, o)``, one by one; but those of its region."""
    size = logits.shape[3]
    row = (heaviest[..., None] * size + torch.arange(size, device=heaviest.device)).flatten(1)
    left_out = logits.gather(2, heaviest[..., None].expand(-1, -1, -1, size)) <= lowest(logits) / 2
    level = blocks.level.gather(1, row).view(left_out.shape).masked_fill(left_out, lowest(logits))
    return Columns(take(blocks.rows, row).view(*heaviest.shape[:2], -1, blocks.rows.shape[2]), level.flatten(2))


def attend(query: Tensor, seen: Columns, scale: float) -> Attended:
    """Softmax attention of ``(G, W, n, d)``."""
    key, value = seen.rows[..., : query.shape[3]], seen.rows[..., query.shape[3] :]
    added = seen.level[:, :, None]
    if not _serves(query, seen.rows):
        logits = scale * (query @ key.mT) + added
        weights = logits.softmax(-1)
        return Attended(weights @ value, logits.logsumexp(-1, keepdim=True))
    added = added.expand(query.shape[0], -1, query.shape[2], -1)
    out, total = _FUSED(query, key, value, attn_mask=added, scale=scale)
    return Attended(out, total[..., None])


def _mix(parts: list[Attended], query: Tensor, tokens: Tokens, scale: float) -> Tensor:
    """One softmax over the keys of all parts and the prefix, ``(G, W, n, dv)``."""
    key, value = tokens.prefix[..., : query.shape[3]], tokens.prefix[..., query.shape[3] :]
    logits = torch.baddbmm(tokens.prefix_level[:, None], query.flatten(1, 2), key.mT, alpha=scale)
    totals = [part.total for part in parts]
    weights = torch.cat([*totals, logits.view(*query.shape[:3], -1)], dim=-1).softmax(-1)
    out = parts[0].out * weights[..., :1]
    for number, part in enumerate(parts[1:], start=1):
        out = torch.addcmul(out, part.out, weights[..., number : number + 1])
    return torch.baddbmm(out.flatten(1, 2), weights[..., len(parts) :].flatten(1, 2), value).view_as(out)


def _mean(query: Tensor, level: Tensor) -> Tensor:
    """Mean of the queries of each window that count, ``(G, W, d)``; 0 where there are none."""
    counted = (level > lowest(level) / 2).to(query.dtype)[..., None]
    return (query * counted).sum(2) / counted.sum(2).clamp_min(1)


def _chunks(tokens: Tokens, blocks: Blocks, slices: Slices, opened: int) -> Iterator[slice]:
    """Windows to attend from in one go: all in an exported graph, whose batch is open."""
    if exporting():
        yield slice(None)
        return
    rows, columns = blocks.rows.shape[1], blocks.number + opened * blocks.rows.shape[1] // blocks.number
    each = rows + columns * blocks.rows.shape[2]
    if not _serves(tokens.query, tokens.rows):
        each += slices.size * (columns + slices.region)  # logits
    step = max(1, 2 * block_size(tokens.rows) // (each * len(tokens.rows)))
    step = ceil(slices.number / ceil(slices.number / step))
    for first in range(0, slices.number, step):
        yield slice(first, first + step)


def _serves(query: Tensor, rows: Tensor) -> bool:
    """Whether the fused attention does: on a CPU, in inference, outside of a compiled graph."""
    eager = not torch.compiler.is_compiling() and not recorded()
    return _FUSED is not None and query.device.type == "cpu" and eager and 2 * query.shape[-1] == rows.shape[-1]
