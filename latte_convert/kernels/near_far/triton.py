"""``near_far`` with one view on a GPU: clusters, then one pass over prefix, region and clusters with an online softmax.

No list of members is sorted and nothing is added in an order that varies. The means of clusters are attention, too: a
cluster asks, its members answer with the logits ``pull``, and all other keys are hidden; parts of the keys are gone
through side by side and brought together as those of a softmax are. What is left of a cluster outside a region
is found where it is needed, from the cluster and the share of each key of the region.

Sums, softmax and k-means are float32 and products TF32: in three passes, as good as float32, for float32 numbers. Keys
and values of clusters are rounded to the dtype of the tokens, and the level of a cluster is that of its rounded key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte_convert.kernels.near_far.clustering import cell_counts, channels_of, grid_cells, moments, sample_places
from latte_convert.kernels.near_far.windows import Places, Tiling
from latte_convert.kernels.tiles import block_of, empty_like_heads, load_rows, product, side, side_by_side, store_rows

PROGRAMS = 512
"""About as many programs keep a large card busy."""
LEAST_PART = 512
"""Keys that are worth a program of their own, at least."""
LAUNCH = {"num_warps": 8, "num_stages": 2}
LOWEST = tl.constexpr(-1e30)
"""In the place of -inf: stays finite when a logit is added."""
GONE = tl.constexpr(64 * torch.finfo(torch.float32).eps)
"""What remains of a cluster up to this share is rounding."""
FINE = tl.constexpr("tf32x3")
LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: Places,
    tiling: Tiling | None,
    *,
    scale: float,
    clusters: int,
    steps: int,
) -> Tensor:
    """``near_far_attention`` with one view; arguments as there and in ``summarise``."""
    query, key, value = (side_by_side(x) for x in (query, key, value))
    far = _summarise(query, key, value, mask, places, scale, clusters, steps)
    return _attend_all(query, key, value, mask, places, tiling, scale, far)


def _summarise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: Places,
    scale: float,
    clusters: int,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Key ``(B·H, c, d)``, value and level of each cluster; cluster and share of its mass of each key, ``(B·H, n)``."""
    batch, heads, _, head_dim = query.shape
    key, value = key[:, :, places.prefix :], value[:, :, places.prefix :]
    seen = None if mask is None else mask[:, places.prefix :]
    mean, spread = moments(*_some(query, seen if places.paired else None))
    pull = query.new_empty(batch * heads, places.tokens, dtype=torch.float32)
    block = block_of(key)
    _pull[(batch * heads, triton.cdiv(places.tokens, block))](
        key, mean, key if seen is None else seen.view(torch.uint8), pull, scale,
        heads, places.tokens, head_dim, *key.stride()[:3], 0 if seen is None else seen.stride(0),
        HEAD_DIM=side(head_dim), MASKED=seen is not None, BLOCK=block,
    )  # fmt: skip
    rows, columns = cell_counts(places.cells_of, clusters)
    assign = grid_cells(places.cells_of, clusters, key.device).int().expand(batch * heads, -1)
    if steps:
        features = _features(key, pull, spread, seen)
        for _ in range(steps):
            means, _, offset, _ = _means(features, None, pull, assign, rows * columns, mean, scale)
            assign = _nearest(features, means, offset)
    centre, shown, level, mass = _means(key, value, pull, assign, rows * columns, mean, scale)
    share = (pull - mass.gather(1, assign.long())).exp_()
    return centre, shown, level, assign, share


def _some(tokens: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens that stand for all, float32 ``(B·H, s, d)``, and which of them count, ``(B·H, s)``."""
    places = sample_places(tokens[:, 0], counted)
    if places is not None:
        tokens = tokens.take_along_dim(places[:, None, :, None], dim=2)
        counted = None if counted is None else counted.gather(1, places)
    if counted is not None:
        counted = counted.repeat_interleave(tokens.shape[1], dim=0)
    return tokens.flatten(0, 1).float(), counted


def _features(key: Tensor, pull: Tensor, spread: Tensor, seen: Tensor | None) -> Tensor:
    """``clustering.features_of`` as ``(B, H, n, r)``."""
    some, weight = key.flatten(0, 1), pull
    places = sample_places(key[:, 0], seen)
    if places is not None:
        some = key.take_along_dim(places[:, None, :, None], dim=2).flatten(0, 1)
        weight = pull.gather(1, places.repeat_interleave(key.shape[1], dim=0))
    channels = channels_of(some.float(), weight, spread)
    shape = (*key.shape[:2], 1, -1)
    found = key.gather(3, channels.view(shape).expand(-1, -1, key.shape[2], -1))
    return found * spread.gather(2, channels).view(shape)


def _means(
    key: Tensor,
    value: Tensor | None,
    pull: Tensor,
    assign: Tensor,
    count: int,
    mean: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted means of the keys and values of each cluster, ``(B·H, c, ·)``, in their dtype.

    Returns:
        Means of keys; means of values; the level of each cluster, or without values ``-|mean|²/2``; the logarithm of
        its mass. The last two are float32 ``(B·H, c)``, and the lowest for an empty cluster.
    """
    batch, heads, size, head_dim = key.shape
    values = key if value is None else value
    value_dim = 0 if value is None else value.shape[3]
    block = block_of(key, values)
    lines, tiles = batch * heads, triton.cdiv(count, block)
    parts = max(1, min(PROGRAMS // (lines * tiles), triton.cdiv(size, LEAST_PART)))
    part = block * triton.cdiv(size, block * parts)
    parts = triton.cdiv(size, part)
    shape = {
        "HEAD_DIM": side(head_dim),
        "VALUE_DIM": side(value_dim),
        "WITH_VALUE": value is not None,
        "BLOCK": block,
        **LAUNCH,
    }
    # Of each part and cluster: the sums of key and value, the largest pull and the mass relative to that.
    sums = key.new_empty(lines, parts, count, head_dim + value_dim + 2, dtype=torch.float32)
    _sum_up[(lines, tiles, parts)](
        key, values, pull, assign, sums, heads, size, head_dim, value_dim, count, part,
        *key.stride()[:3], *values.stride()[:3], assign.stride(0), **shape,
    )  # fmt: skip
    means, shown = key.new_empty(lines, count, head_dim), values.new_empty(lines, count, value_dim)
    level, mass = (sums.new_empty(lines, count) for _ in range(2))
    _bring_together[(lines, tiles)](
        sums, mean, means, shown, level, mass, scale, head_dim, value_dim, count, parts, **shape
    )
    return means, shown, level, mass


def _nearest(features: Tensor, means: Tensor, offset: Tensor) -> Tensor:
    """The cluster with the nearest mean, int32 ``(B·H, n)``; never one that is empty."""
    batch, heads, size, channels = features.shape
    assign = torch.empty(batch * heads, size, dtype=torch.int32, device=features.device)
    block = block_of(features)
    _choose[(batch * heads, triton.cdiv(size, block))](
        features, means, offset, assign, heads, size, channels, means.shape[1], *features.stride()[:3],
        CHANNELS=side(channels), BLOCK=block,
    )  # fmt: skip
    return assign


def _attend_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    places: Places,
    tiling: Tiling | None,
    scale: float,
    far: tuple[Tensor, ...],
) -> Tensor:
    """All queries, window by window; ``far`` is what ``_summarise`` gives."""
    batch, heads, queries, head_dim = query.shape
    value_dim = value.shape[3]
    block = block_of(query, value)
    region = 0 if tiling is None else tiling.region_tokens
    if tiling is None:  # slices of a sequence, without regions
        tiling = Tiling((queries, 1), (triton.cdiv(queries, block), 1), (block, 1), (0, 0))
    rows = min(block, side(tiling.window_tokens))
    tiles = triton.cdiv(tiling.window_tokens, rows)
    out = empty_like_heads(query, value_dim)
    seen = key if mask is None else mask.view(torch.uint8)
    _attend[(batch * heads, tiling.number * tiles)](
        query, key, value, seen, *far, out, scale * LOG2_E.value,
        heads, places.prefix, region, far[0].shape[1], head_dim, value_dim, far[3].stride(0), places.tokens,
        *tiling.grid, tiling.counts[1], *tiling.window, *tiling.halo, tiles,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        0 if mask is None else seen.stride(0),
        HEAD_DIM=side(head_dim), VALUE_DIM=side(value_dim), MASKED=mask is not None, ROWS=rows,
        BLOCK=block, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def _pull(
    key, mean, seen, pull, scale, heads, size, head_dim, key_batch, key_head, key_row, seen_batch,
    HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits of the keys with the mean query; -inf for one that is not seen."""
    line = tl.program_id(0).to(tl.int64)
    key += line // heads * key_batch + line % heads * key_head
    rows, channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_DIM)
    inside = rows < size
    centre = tl.load(mean + line * head_dim + channels, mask=channels < head_dim, other=0.0)
    tile = load_rows(key, rows, channels, key_row, inside, head_dim).to(tl.float32)
    found = scale * tl.sum(tile * centre[None, :], axis=1)
    if MASKED:
        shown = tl.load(seen + line // heads * seen_batch + rows, mask=inside, other=0) != 0
        found = tl.where(shown, found, float("-inf"))
    tl.store(pull + line * size + rows, found, mask=inside)


@triton.jit
def _sum_up(
    key, value, pull, assign, sums, heads, size, head_dim, value_dim, count, part,
    key_batch, key_head, key_row, value_batch, value_head, value_row, assign_line,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WITH_VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over the members of some clusters among one part of the keys."""
    line = tl.program_id(0).to(tl.int64)
    key += line // heads * key_batch + line % heads * key_head
    value += line // heads * value_batch + line % heads * value_head
    clusters = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels, columns = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    centre = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    shown = tl.zeros([BLOCK, VALUE_DIM], tl.float32)
    begin = tl.program_id(2) * part
    for start in range(begin, tl.minimum(begin + part, size), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < size
        logits = tl.load(pull + line * size + rows, mask=inside, other=float("-inf"))
        member = tl.load(assign + line * assign_line + rows, mask=inside, other=-1)
        logits = tl.where(member[None, :] == clusters[:, None], logits[None, :], float("-inf"))
        highest = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp(logits - highest[:, None])
        fade = tl.exp(top - highest)
        top, mass = highest, mass * fade + tl.sum(weights, axis=1)
        keys = load_rows(key, rows, channels, key_row, inside, head_dim)
        centre = product(weights.to(keys.dtype), keys, centre * fade[:, None], FINE)
        if WITH_VALUE:
            values = load_rows(value, rows, columns, value_row, inside, value_dim)
            shown = product(weights.to(values.dtype), values, shown * fade[:, None], FINE)
    width = head_dim + value_dim + 2
    sums += (line * tl.num_programs(2) + tl.program_id(2)) * count * width
    inside = clusters < count
    store_rows(sums, clusters, channels, width, inside, head_dim, centre)
    if WITH_VALUE:
        store_rows(sums + head_dim, clusters, columns, width, inside, value_dim, shown)
    tl.store(sums + clusters * width + width - 2, top, mask=inside)
    tl.store(sums + clusters * width + width - 1, mass, mask=inside)


@triton.jit
def _bring_together(
    sums, mean, means, shown, level, mass, scale, head_dim, value_dim, count, parts,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WITH_VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Means, level and mass of some clusters from the sums of all parts."""
    line = tl.program_id(0).to(tl.int64)
    clusters = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channels, columns = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    inside = clusters < count
    width = head_dim + value_dim + 2
    sums += line * parts * count * width
    top = tl.full([BLOCK], LOWEST, tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    centre = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    values = tl.zeros([BLOCK, VALUE_DIM], tl.float32)
    for _ in range(parts):
        own = tl.load(sums + clusters * width + width - 2, mask=inside, other=LOWEST)
        highest = tl.maximum(top, own)
        fade, come = tl.exp(top - highest), tl.exp(own - highest)
        top = highest
        whole = whole * fade + come * tl.load(sums + clusters * width + width - 1, mask=inside, other=0.0)
        new = load_rows(sums, clusters, channels, width, inside, head_dim)
        centre = centre * fade[:, None] + new * come[:, None]
        if WITH_VALUE:
            new = load_rows(sums + head_dim, clusters, columns, width, inside, value_dim)
            values = values * fade[:, None] + new * come[:, None]
        sums += count * width
    empty = whole == 0.0
    whole = tl.where(empty, 1.0, whole)
    logarithm = tl.where(empty, LOWEST, top + tl.log(whole))
    centre = (centre / whole[:, None]).to(means.dtype.element_ty)
    store_rows(means + line * count * head_dim, clusters, channels, head_dim, inside, head_dim, centre)
    centre = centre.to(tl.float32)
    if WITH_VALUE:
        values = values / whole[:, None]
        store_rows(shown + line * count * value_dim, clusters, columns, value_dim, inside, value_dim, values)
        middle = tl.load(mean + line * head_dim + channels, mask=channels < head_dim, other=0.0)
        added = logarithm - scale * tl.sum(centre * middle[None, :], axis=1)
    else:
        added = -0.5 * tl.sum(centre * centre, axis=1)
    tl.store(level + line * count + clusters, tl.where(empty, LOWEST, added), mask=inside)
    tl.store(mass + line * count + clusters, logarithm, mask=inside)


@triton.jit
def _choose(
    features, means, offset, assign, heads, size, channels, count, batch_stride, head_stride, row_stride,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The nearest mean of each of some tokens, the first of equals."""
    line = tl.program_id(0).to(tl.int64)
    features += line // heads * batch_stride + line % heads * head_stride
    rows, columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    own = load_rows(features, rows, columns, row_stride, rows < size, channels)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        clusters = start + tl.arange(0, BLOCK)
        others = load_rows(means + line * count * channels, clusters, columns, channels, clusters < count, channels)
        added = tl.load(offset + line * count + clusters, mask=clusters < count, other=float("-inf"))
        scores = product(own, tl.trans(others), tl.broadcast_to(added[None, :], (BLOCK, BLOCK)), FINE)
        highest, where = tl.max(scores, axis=1, return_indices=True)
        chosen = tl.where(highest > best, start + where, chosen)
        best = tl.maximum(best, highest)
    tl.store(assign + line * size + rows, chosen, mask=rows < size)


@triton.jit
def _online(logits, values, top, total, out):
    """Go on with a softmax, whose logits are of base 2, over more columns."""
    highest = tl.maximum(top, tl.max(logits, axis=1))
    weights = tl.exp2(logits - highest[:, None])
    fade = tl.exp2(top - highest)
    out = product(weights.to(values.dtype), values, out * fade[:, None], FINE)
    return highest, total * fade + tl.sum(weights, axis=1), out


@triton.jit
def _exact_keys(
    start, above, left, seen, prefix, region, height, width, region_width, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Some of the keys that a window sees one by one, the prefix and then its region; and which of them there are."""
    column = start + tl.arange(0, BLOCK)
    place = column - prefix
    y, x = above + place // region_width, left + place % region_width
    inside = (place < 0) | ((place < region) & (y >= 0) & (y < height) & (x >= 0) & (x < width))
    token = tl.where(place < 0, column, prefix + y * width + x)
    if MASKED:
        inside = inside & (tl.load(seen + token, mask=inside, other=0) != 0)
    return token, inside


@triton.jit
def _attend(
    query, key, value, seen, centre, shown, level, assign, share, out, factor,
    heads, prefix, region, count, head_dim, value_dim, assign_line, size,
    height, width, across, window_height, window_width, halo_above, halo_left, tiles,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    value_batch, value_head, value_row, out_batch, out_head, out_row, seen_batch,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some queries of one window: prefix and region key by key, then the clusters, less their members in the region."""
    line = tl.program_id(0).to(tl.int64)
    batch, head = line // heads, line % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    out += batch * out_batch + head * out_head
    seen += batch * seen_batch
    centre += line * count * head_dim
    shown += line * count * value_dim
    level += line * count
    assign += line * assign_line
    share += line * size
    window, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    above, left = window // across * window_height, window % across * window_width
    channels, columns = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    place = tile * ROWS + tl.arange(0, ROWS)
    y, x = above + place // window_width, left + place % window_width
    asks = (place < window_height * window_width) & (y < height) & (x < width)
    rows = y * width + x
    queries = load_rows(query, rows, channels, query_row, asks, head_dim)
    above, left, region_width = above - halo_above, left - halo_left, window_width + 2 * halo_left
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUE_DIM], tl.float32)
    nothing = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, prefix + region, BLOCK):
        token, inside = _exact_keys(
            start, above, left, seen, prefix, region, height, width, region_width, MASKED, BLOCK
        )
        keys = load_rows(key, token, channels, key_row, inside, head_dim)
        values = load_rows(value, token, columns, value_row, inside, value_dim)
        logits = factor * product(queries, tl.trans(keys), nothing, FINE)
        logits = tl.where(inside[None, :], logits, LOWEST)
        top, total, result = _online(logits, values, top, total, result)
    for start in range(0, count, BLOCK):
        clusters = start + tl.arange(0, BLOCK)
        there = clusters < count
        taken = tl.zeros([BLOCK], tl.float32)
        for first in range(0, region, BLOCK):
            token, inside = _exact_keys(first, above, left, seen, 0, region, height, width, region_width, False, BLOCK)
            member = tl.load(assign + token, mask=inside, other=-1)
            part = tl.load(share + token, mask=inside, other=0.0)
            taken += tl.sum(tl.where(member[None, :] == clusters[:, None], part[None, :], 0.0), axis=1)
        rest = 1.0 - taken
        added = tl.load(level + clusters, mask=there, other=LOWEST) * LOG2_E
        added += tl.where(rest <= GONE, LOWEST, tl.log2(tl.where(rest <= GONE, 1.0, rest)))
        keys = load_rows(centre, clusters, channels, head_dim, there, head_dim)
        values = load_rows(shown, clusters, columns, value_dim, there, value_dim)
        logits = factor * product(queries, tl.trans(keys), nothing, FINE) + added[None, :]
        top, total, result = _online(logits, values, top, total, result)
    store_rows(out, rows, columns, out_row, asks, value_dim, result / total[:, None])
