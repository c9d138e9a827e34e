"""``latte`` on a GPU: one kernel sums up what queries need to know of the keys, one reads the sums.

Chunks of keys are summed side by side. The sums of a chunk are one matrix, ``[K~, 1]ᵀ[V, 1]``: the padding feature
is its last row, the divisor its last column. Without causality they are added up; with it, each chunk of queries starts
from the running sum of the chunks before, and goes through its own pairs in blocks. Everything is float32 but the
tokens themselves, and products are TF32: in three passes, as good as float32, for float32 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte_convert.kernels.tiles import (
    block_of,
    empty_like_heads,
    load_rows,
    precision,
    product,
    side,
    side_by_side,
    store_rows,
)

if TYPE_CHECKING:
    from latte_convert.kernels.latte.kernel import Settings

CHUNK = 256
"""Keys of a causal chunk; without causality, the fewest of one."""
PROGRAMS = 512
"""About as many programs keep a large card busy."""
LAUNCH = {"num_warps": 8, "num_stages": 2}
"""Read off what the compiler makes of it: nothing is spilled at 64 channels in half precision."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: Settings, *, causal: bool
) -> Tensor:
    """``latte_attention``; arguments as there, with the scalars already brought together."""
    query, key, value = (side_by_side(x) for x in (query, key, value))
    batch, heads, queries, head_dim = query.shape
    keys, value_dim = value.shape[2:]
    block = block_of(query, value)
    shape = {
        "HEAD_DIM": side(head_dim),
        "VALUE_DIM": min(block, side(value_dim)),
        "NORMALISED": settings.eps is not None,
        "MASKED": mask is not None,
        "PRECISION": precision(query.dtype),
        "BLOCK": block,
        **LAUNCH,
    }
    parts = triton.cdiv(value_dim, shape["VALUE_DIM"])
    chunks = triton.cdiv(keys, CHUNK)
    if not causal:
        chunks = max(1, min(chunks, PROGRAMS // (batch * heads * parts)))
    chunk = block * triton.cdiv(keys, block * chunks)
    chunks = triton.cdiv(keys, chunk)
    seen = key if mask is None else mask.view(torch.uint8)
    scalars = torch.stack([x.reshape(-1).expand(heads) for x in (settings.shift, settings.delta, settings.beta)])
    common = (scalars.contiguous(), settings.eps or 0.0, heads, queries, keys, head_dim, value_dim, chunk)
    strides = (*key.stride()[:3], *value.stride()[:3], seen.stride(0))
    # Causal sums stand behind their chunk, so that what is added up in front of a chunk is what its queries start from.
    sums = query.new_empty(batch * heads, chunks + causal, head_dim + 1, value_dim + 1, dtype=torch.float32)
    if causal:
        sums[:, 0] = 0
    _sum_up[(batch * heads, chunks, parts)](
        key, value, seen, sums[:, int(causal) :], sums.stride(0), *common, *strides, **shape
    )
    sums = sums.cumsum(1) if causal else sums.sum(1, keepdim=True)
    out = empty_like_heads(query, value_dim)
    sigma = sums if settings.sigma is None else settings.sigma.reshape(heads, value_dim).contiguous()
    shape["SCALED"] = settings.sigma is not None
    first = 0
    if causal:
        first = max(keys - queries, 0) // block  # blocks of places before the first query's
        if queries > keys:
            out[:, :, : queries - keys] = 0  # they see no key
    read, blocks = (_read_causal, triton.cdiv(keys, block) - first) if causal else (_read, triton.cdiv(queries, block))
    read[(batch * heads, blocks, parts)](
        query, key, value, seen, sums, sums.stride(0), sigma, out, first,
        *common, *query.stride()[:3], *out.stride()[:3], *strides, **shape,
    )  # fmt: skip
    return out


@triton.jit
def _features(tokens, columns, width, shift, eps, NORMALISED: tl.constexpr):
    """``psi`` of a tile of tokens, and what each is to be divided by."""
    psi = tokens.to(tl.float32) + shift
    psi = tl.where((columns < width)[None, :], psi * psi, 0.0)
    size = tl.sqrt(tl.sum(psi * psi, axis=1)) + eps if NORMALISED else tl.sum(psi * 0.0, axis=1) + 1.0
    return psi, size


@triton.jit
def _key_features(
    key, seen, rows, columns, stride, keys, width, shift, eps, NORMALISED: tl.constexpr, MASKED: tl.constexpr
):
    """Normalised features of a tile of keys, zero for one that is not seen; and 1 or 0 for whether it is."""
    inside = rows < keys
    if MASKED:
        inside = inside & (tl.load(seen + rows, mask=inside, other=0) != 0)
    psi, size = _features(load_rows(key, rows, columns, stride, inside, width), columns, width, shift, eps, NORMALISED)
    return tl.where(inside[:, None], psi / size[:, None], 0.0), tl.where(inside, 1.0, 0.0)


@triton.jit
def _sum_up(
    key, value, seen, sums, sums_head,
    scalars, eps, heads, queries, keys, head_dim, value_dim, chunk,
    key_batch, key_head, key_row, value_batch, value_head, value_row, seen_batch,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORMALISED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[K~, 1]ᵀ[V, 1]`` of one chunk, for some of the value's channels."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    number = tl.program_id(1)
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    seen += batch * seen_batch
    sums += tl.program_id(0).to(tl.int64) * sums_head + number.to(tl.int64) * (head_dim + 1) * (value_dim + 1)
    shift = tl.load(scalars + head)
    channels = tl.arange(0, HEAD_DIM)
    columns = tl.program_id(2) * VALUE_DIM + tl.arange(0, VALUE_DIM)
    state = tl.zeros([HEAD_DIM, VALUE_DIM], tl.float32)
    total = tl.zeros([HEAD_DIM], tl.float32)
    whole = tl.zeros([VALUE_DIM], tl.float32)
    counts = tl.zeros([BLOCK], tl.float32)
    for start in range(number * chunk, tl.minimum((number + 1) * chunk, keys), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        features, counted = _key_features(
            key, seen, rows, channels, key_row, keys, head_dim, shift, eps, NORMALISED, MASKED
        )
        values = load_rows(value, rows, columns, value_row, counted > 0, value_dim).to(tl.float32)
        state = product(tl.trans(features), values, state, PRECISION)
        total += tl.sum(features, axis=0)
        whole += tl.sum(values, axis=0)
        counts += counted
    lines = value_dim + 1
    inside = channels < head_dim
    store_rows(sums, channels, columns, lines, inside, value_dim, state)
    tl.store(sums + head_dim * lines + columns, whole, mask=columns < value_dim)
    if tl.program_id(2) == 0:
        tl.store(sums + channels * lines + value_dim, total, mask=inside)
        tl.store(sums + head_dim * lines + value_dim, tl.sum(counts, axis=0))


@triton.jit
def _sums_of(sums, channels, columns, head_dim, value_dim):
    """State, total, sum of values and number of keys, from their matrix."""
    lines = value_dim + 1
    inside = channels < head_dim
    state = load_rows(sums, channels, columns, lines, inside, value_dim)
    total = tl.load(sums + channels * lines + value_dim, mask=inside, other=0.0)
    whole = tl.load(sums + head_dim * lines + columns, mask=columns < value_dim, other=0.0)
    return state, total, whole, tl.load(sums + head_dim * lines + value_dim)


@triton.jit
def _read(
    query, key, value, seen, sums, sums_head, sigma, out, first,
    scalars, eps, heads, queries, keys, head_dim, value_dim, chunk,
    query_batch, query_head, query_row, out_batch, out_head, out_row,
    key_batch, key_head, key_row, value_batch, value_head, value_row, seen_batch,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORMALISED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The mean value, and what the features of each query add to it."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    query += batch * query_batch + head * query_head
    out += batch * out_batch + head * out_head
    shift = tl.load(scalars + head)
    delta = tl.load(scalars + heads + head)
    beta = tl.load(scalars + 2 * heads + head)
    channels = tl.arange(0, HEAD_DIM)
    columns = tl.program_id(2) * VALUE_DIM + tl.arange(0, VALUE_DIM)
    state, total, whole, count = _sums_of(
        sums + tl.program_id(0).to(tl.int64) * sums_head, channels, columns, head_dim, value_dim
    )
    mean = whole / tl.maximum(count, 1.0)
    state = delta * (state - total[:, None] * mean[None, :])
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < queries
    psi, size = _features(
        load_rows(query, rows, channels, query_row, inside, head_dim), channels, head_dim, shift, eps, NORMALISED
    )
    divisor = delta * tl.sum(psi * total[None, :], axis=1) + beta * count * size
    psi = psi / tl.where(divisor == 0.0, 1.0, divisor)[:, None]
    result = product(psi, state, tl.broadcast_to(mean[None, :], (BLOCK, VALUE_DIM)), PRECISION)
    if SCALED:
        result *= tl.load(sigma + head * value_dim + columns, mask=columns < value_dim, other=0.0)[None, :]
    store_rows(out, rows, columns, out_row, inside, value_dim, result)


@triton.jit
def _read_causal(
    query, key, value, seen, sums, sums_head, sigma, out, first,
    scalars, eps, heads, queries, keys, head_dim, value_dim, chunk,
    query_batch, query_head, query_row, out_batch, out_head, out_row,
    key_batch, key_head, key_row, value_batch, value_head, value_row, seen_batch,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, NORMALISED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The queries whose own keys are one block: the sums of the chunks before, then the pairs of the own chunk."""
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    query += batch * query_batch + head * query_head
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    out += batch * out_batch + head * out_head
    seen += batch * seen_batch
    shift = tl.load(scalars + head)
    delta = tl.load(scalars + heads + head)
    beta = tl.load(scalars + 2 * heads + head)
    channels = tl.arange(0, HEAD_DIM)
    columns = tl.program_id(2) * VALUE_DIM + tl.arange(0, VALUE_DIM)
    begin = (first + tl.program_id(1)) * BLOCK
    number = begin // chunk
    sums += tl.program_id(0).to(tl.int64) * sums_head + number.to(tl.int64) * (head_dim + 1) * (value_dim + 1)
    state, total, whole, count = _sums_of(sums, channels, columns, head_dim, value_dim)
    places = begin + tl.arange(0, BLOCK)  # among the keys
    rows = places - (keys - queries)
    inside = (rows >= 0) & (rows < queries)
    psi, size = _features(
        load_rows(query, rows, channels, query_row, inside, head_dim), channels, head_dim, shift, eps, NORMALISED
    )
    psi, padding = delta * psi, beta * size
    weighted = product(psi, state, padding[:, None] * whole[None, :], PRECISION)
    divisor = tl.sum(psi * total[None, :], axis=1) + padding * count
    for start in range(number * chunk, begin + BLOCK, BLOCK):
        others = start + tl.arange(0, BLOCK)
        features, counted = _key_features(
            key, seen, others, channels, key_row, keys, head_dim, shift, eps, NORMALISED, MASKED
        )
        values = load_rows(value, others, columns, value_row, counted > 0, value_dim).to(tl.float32)
        pairs = product(psi, tl.trans(features), padding[:, None] * counted[None, :], PRECISION)
        pairs = tl.where(others[None, :] <= places[:, None], pairs, 0.0)
        divisor += tl.sum(pairs, axis=1)
        weighted = product(pairs, values, weighted, PRECISION)
    result = tl.where((divisor == 0.0)[:, None], 0.0, weighted / tl.where(divisor == 0.0, 1.0, divisor)[:, None])
    if SCALED:
        result *= tl.load(sigma + head * value_dim + columns, mask=columns < value_dim, other=0.0)[None, :]
    store_rows(out, rows, columns, out_row, inside, value_dim, result)
