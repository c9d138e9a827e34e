"""A sketch, not part of the package: near-linear attention with blocks that each window sees in its own way.

Nearby keys, the heaviest blocks and the prefix are seen one by one, the rest in blocks that each window of queries sees
through its own mean query. Inference on a CPU only; scripts/results/sketch_blocks.md has what was measured.

Queries are cut into ``W`` windows of neighbours (equal halves of halves of their places). Keys of each head are cut into
``C`` blocks of equal size ``m`` (equal parts of equal parts along the direction of most variance, in the units in which
queries tell keys apart). For a window with mean query ``q̄`` and a block ``C``, over the members outside the region::

    e_j = exp(s<q̄,k_j>),  M = sum e_j,  c = sum e_j k_j / M,  v_C = sum e_j v_j / M,  b = log M - s<q̄,c>

stand for ``sum_j exp(s<q,k_j>) v_j ≈ exp(s<q,c> + b) v_C``: exact at ``q̄`` and right to first order around it. The
``opened`` blocks with most mass ``M`` are not summarised but attended to key by key, as are the prefix and the region:
the ``region`` tokens nearest to the window. Nothing is counted twice: the region is left out of ``M``, ``c`` and ``v_C``
exactly, and out of opened blocks. One softmax over all of it, as two fused calls mixed by their denominators.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
GOLDEN = (5**0.5 - 1) / 2


class Windows(NamedTuple):
    """Which queries go together and what they see one by one; depends on places only, so made once per layout.

    query: (W, n) int64, number of each window's tokens; the window's first token repeated where it has fewer than n.
    real:  (W, n) bool, False for the repeats.
    near:  (W, r) int64, the r tokens nearest to the window (its own are among them).
    back:  (N,) int64, where each token is in ``query.flatten()``.
    """

    query: Tensor
    real: Tensor
    near: Tensor
    back: Tensor


def _halves(places: Tensor, parts: int) -> list[Tensor]:
    def cut(index: Tensor, parts: int) -> list[Tensor]:
        if parts == 1:
            return [index]
        some = places[index]
        side = int((some.amax(0) - some.amin(0)).argmax())
        # ties by the other coordinates, so that the cut is a line where it can be
        other = some[:, 1 - side] if some.shape[1] > 1 else some[:, 0]
        first = other.argsort(stable=True)
        order = first[some[first, side].argsort(stable=True)]
        left = parts // 2
        at = round(len(index) * left / parts)
        return cut(index[order[:at]], left) + cut(index[order[at:]], parts - left)

    return cut(torch.arange(len(places)), parts)


def make_windows(places: Tensor, size: int, region: int) -> Windows:
    """Windows of about ``size`` tokens and their ``region`` nearest tokens, from ``places`` (N, 2) float."""
    count, tokens = max(1, round(len(places) / size)), len(places)
    groups = [g.sort().values for g in _halves(places, count)]
    most = max(map(len, groups))
    query = torch.stack([torch.cat([g, g[:1].expand(most - len(g))]) for g in groups])
    real = torch.stack([torch.arange(most) < len(g) for g in groups])
    low = torch.stack([places[g].amin(0) for g in groups])
    high = torch.stack([places[g].amax(0) for g in groups])
    region = min(max(region, most), tokens)
    near = []
    for first in range(0, count, 64):  # max-norm distance to the window's box; ties by Euclidean, then by number
        gap = torch.maximum(low[first : first + 64, None] - places, places - high[first : first + 64, None]).clamp_min(
            0
        )
        far = gap.amax(-1) + 1e-3 * gap.sum(-1)
        near.append(far.topk(region, dim=1, largest=False, sorted=False).indices.sort(1).values)
    back = torch.empty(tokens, dtype=torch.long)
    flat = torch.arange(count * most).reshape(count, most)
    back[query[real]] = flat[real]
    return Windows(query, real, torch.cat(near), back)


@lru_cache(32)
def grid_windows(grid: tuple[int, int], size: int, region: int) -> Windows:
    """``make_windows`` of a grid, row by row."""
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    return make_windows(torch.stack([y, x], -1).reshape(-1, 2).float(), size, region)


def factors(blocks: int) -> list[int]:
    """Cuts in two only: quartile cuts take half of the sorting but lose a third of the fidelity."""
    return [2] * (blocks.bit_length() - 1)


def equal_blocks(query: Tensor, key: Tensor, blocks: int, channels: int = 32, look: int = 64) -> Tensor:
    """Members of ``blocks`` (a power of two) equal blocks of keys, ``(H, blocks, m)``; numbers from N on are none.

    The distance of keys that matters is that of logits: channels are scaled by the spread of queries, and the
    ``channels`` that vary most then are used. Each part is cut in two at the median of its own first
    principal direction (three turns of power iteration on ``look`` members).
    """
    heads, tokens, d = key.shape
    max(1, tokens // 512)
    sample = (torch.arange(min(tokens, 512)) * GOLDEN % 1 * tokens).long()
    spread = query[:, sample.clamp_max(query.shape[1] - 1)].std(1, keepdim=True)
    some = key[:, sample]
    size = some.std(1, keepdim=True) * spread
    pick = size.topk(min(channels, d), dim=-1).indices
    feature = (key.gather(2, pick.expand(-1, tokens, -1)) - some.mean(1, keepdim=True).gather(2, pick)) * spread.gather(
        2, pick
    )
    m = -(-tokens // blocks)
    feature = F.pad(feature, (0, 0, 0, m * blocks - tokens))
    order = torch.arange(m * blocks).expand(heads, -1)
    parts = 1
    base = m * blocks * torch.arange(heads)[:, None]
    for cut in factors(blocks):
        inside = (
            feature.flatten(0, 1).index_select(0, (order + base).flatten()).view(heads * parts, -1, feature.shape[2])
            if parts > 1
            else feature
        )
        rows = inside.shape[1]
        real = (order < tokens).view(heads * parts, -1)
        n = min(rows, look)
        at = (torch.arange(n) * GOLDEN % 1 * rows).long() if rows > n else torch.arange(n)
        weight = real[:, at, None].to(inside.dtype)
        seen = inside[:, at]
        centred = (seen - (seen * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)) * weight
        farthest = centred.square().sum(-1).argmax(1)
        way = centred.gather(1, farthest[:, None, None].expand(-1, 1, centred.shape[2]))
        for _ in range(3):
            way = (way @ centred.mT) @ centred
            way = way / way.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        along = (inside @ way.mT)[..., 0]
        if m * blocks > tokens:
            along = along.masked_fill(~real, float("inf"))
        order = order.view(heads * parts, -1).gather(1, along.argsort(dim=1, stable=True)).view(heads, -1)
        parts *= cut
    return order.view(heads, blocks, m)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    windows: Windows,
    prefix: int = 0,
    blocks: int = 128,
    opened: int = 8,
    size: Tensor | None = None,
    budget: int = 2**20,
    members: Tensor | None = None,
) -> Tensor:
    """Attention of all tokens of one sample, ``(H, N, d)``; the first ``prefix`` tokens attend, and are attended to, exactly.

    ``windows`` numbers tokens behind the prefix. ``size`` (N,): how many tokens each stands for (merged tokens count so
    often). ``members``: ``equal_blocks`` of another call, where clusters are shared.
    """
    heads, total, d = query.shape
    dv = value.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    result = query.new_empty(total, heads, dv)
    counts = None if size is None else size.to(wide).log()
    bias = None if counts is None else counts[None, None, None]
    result[:prefix] = F.scaled_dot_product_attention(
        query[None, :, :prefix],
        key[None],
        value[None],
        attn_mask=None if bias is None else bias.to(query.dtype),
        scale=scale,
    )[0].transpose(0, 1)
    n = total - prefix
    index, real, near, back = windows
    number, each = index.shape
    m = -(-n // blocks)
    padded = blocks * m
    opened = min(opened, blocks)
    if members is None:
        members = equal_blocks(query[:, prefix:].to(wide), key[:, prefix:].to(wide), blocks)
    place = torch.empty(heads, padded, dtype=torch.long).scatter_(
        1, members.flatten(1), torch.arange(padded).expand(heads, -1)
    )
    share = real.to(wide)[..., None] / real.sum(1)[:, None, None]
    per = max(1, min(number, budget // (max(blocks, near.shape[1] + opened * m + prefix) * (d + dv))))
    for h in range(heads):
        # sorted rows: keys and values of the blocks in order, then the prefix
        both = torch.cat([key[h], value[h]], -1).to(wide)
        order = members[h].flatten()
        source = torch.cat([(order + prefix).clamp_max(total - 1), torch.arange(prefix)])
        rows = both.index_select(0, source)
        ks, kvb = rows[:padded, :d], rows[:padded].view(blocks, m, d + dv)
        added = None
        if counts is not None or padded > n:
            added = rows.new_zeros(padded + prefix) if counts is None else counts[source]
            if padded > n:
                added[:padded][order >= n] = float("-inf")
        q = query[h, prefix:].to(wide).index_select(0, index.flatten()).view(number, each, d)
        mean = (q * share).sum(1)
        out = q.new_empty(number, each, dv)
        for f in range(0, number, per):
            some = slice(f, f + per)
            w = len(mean[some])
            seen = place[h].index_select(0, near[some].flatten()).view(w, -1)  # (w, r) rows of the region
            logit = torch.mm(mean[some], ks.T).mul_(scale)
            if added is not None:
                logit += added[:padded]
            logit.scatter_(1, seen, float("-inf"))
            top = logit.amax(1, keepdim=True).clamp_min(-1e30)
            e = logit.sub_(top).exp_().view(w, blocks, m)
            mass = e.sum(-1)  # (w, C)
            y = torch.bmm(e.transpose(0, 1), kvb)  # (C, w, d + dv)
            y /= mass.T.clamp_min(1e-37)[..., None]
            level = mass.log() + top - scale * torch.bmm(mean[some, None], y[..., :d].permute(1, 2, 0))[:, 0]
            columns = [seen]
            if opened:
                best = mass.topk(opened, dim=1, sorted=False).indices  # (w, K)
                level.scatter_(1, best, float("-inf"))
                columns.append((best[..., None] * m + torch.arange(m)).flatten(1))
            if prefix:
                columns.append(torch.arange(padded, padded + prefix).expand(w, -1))
            columns = torch.cat(columns, 1)
            close = rows.index_select(0, columns.flatten()).view(w, -1, d + dv)
            extra = rows.new_zeros(columns.shape) if counts is None else added[columns]
            if opened:
                r = seen.shape[1]
                hidden = e.gather(1, best[..., None].expand(-1, -1, m)).flatten(1) == 0
                extra[:, r : r + opened * m].masked_fill_(hidden, float("-inf"))
            a, la = _fused(q[some], close[..., :d], close[..., d:], extra, scale)
            b, lb = _fused(q[some], y[..., :d].transpose(0, 1), y[..., d:].transpose(0, 1), level, scale)
            torch.lerp(b, a, (la - lb).sigmoid_()[..., None], out=out[some])
        result[prefix:, h] = out.flatten(0, 1).index_select(0, back).to(result.dtype)
    return result.transpose(0, 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bias = bias.clamp_min(-1e30)[:, None, None, :].expand(-1, -1, q.shape[1], -1)
    out, total = _FUSED(q[:, None], k[:, None], v[:, None], attn_mask=bias, scale=scale)
    return out[:, 0], total.reshape(q.shape[0], q.shape[1])


def near_far_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    prefix: int = 0,
    grid: tuple[int, int] | None = None,
    places: Tensor | None = None,
    size: Tensor | None = None,
    mask: Tensor | None = None,
    window: int = 128,
    region: int = 256,
    blocks: int = 128,
    opened: int = 8,
) -> Tensor:
    """``attend`` for a batch, sample by sample, so that no sample depends on another or on padding.

    Args:
        query, key, value: ``(B, H, N, d)`` of the same tokens, any floating dtype; float32 inside.
        scale: Factor on the logits.
        prefix: Tokens before the others, exact both ways.
        grid: ``(h, w)`` of the tokens behind the prefix. Without it, or where they do not fill it, ``places``.
        places: ``(B, N - prefix, 2)``, where tokens are (merged ones: means of their members). Neither: a sequence.
        size: ``(B, N)``, tokens that each stands for.
        mask: bool ``(B, N)``, True where a key counts. A sample is computed as if the others were not there; the
            output rows of tokens that do not count are zeros.
        window, region, blocks, opened: See the module; ``blocks`` is a power of two. Where the columns are no fewer
            than the keys, softmax runs.
    """
    result = torch.zeros_like(query)
    for b in range(len(query)):
        keep = None if mask is None else mask[b].nonzero()[:, 0]
        pick = (lambda x: x) if keep is None else (lambda x: x.index_select(-2, keep))
        q, k, v = (pick(x[b]) for x in (query, key, value))
        n = q.shape[1]
        if n == 0:
            continue
        first = prefix if keep is None else int((keep < prefix).sum())
        weight = None if size is None else (size[b] if keep is None else size[b][keep])
        tokens = n - first
        m = -(-tokens // blocks)
        if tokens <= region + blocks + opened * m:
            bias = None if weight is None else weight.log().to(q.dtype)[None, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        else:
            if keep is None and grid is not None and grid[0] * grid[1] == tokens:
                windows = grid_windows(grid, window, region)
            else:
                if places is not None:
                    at = places[b]
                elif grid is not None and grid[0] * grid[1] == query.shape[2] - prefix:
                    i = torch.arange(grid[0] * grid[1])
                    at = torch.stack([i // grid[1], i % grid[1]], 1).float()
                else:
                    at = torch.arange(query.shape[2] - prefix)[:, None].expand(-1, 2).float()
                if keep is not None:
                    at = at[keep[keep >= prefix] - prefix]
                windows = make_windows(at, window, region)
            out = attend(q, k, v, scale=scale, windows=windows, prefix=first, blocks=blocks, opened=opened, size=weight)
        if keep is None:
            result[b] = out
        else:
            result[b].index_copy_(1, keep, out)
    return result
