"""blocks: softmax attention that sees nearby keys and the prefix one by one, and the rest in blocks.

A query sees three kinds of columns under *one* softmax:

* the **prefix** (CLS, registers), key by key;
* its **region**, key by key: tokens lie along a curve that keeps neighbours together, a Hilbert curve on a grid and the
  text itself in a sequence. A slice of it is a window of queries, and a longer slice around that is their region;
* **blocks**: equal numbers of keys that are alike, less the members in the region. The heaviest blocks of a window are
  opened and seen key by key, each of the others is one column.

**A block's column** is made for each window. What is wanted of the members ``C`` outside the region is
``sum_{j in C} exp(s<q, k_j>)·v_j`` for all queries ``q`` of a window, which are near to each other. Around their mean
``q̄``, with the weights ``p_j = exp(s<q̄, k_j>) / M`` where ``M = sum_{j in C} exp(s<q̄, k_j>)``, put ``c = sum p_j·k_j``
and ``v_C = sum p_j·v_j``. To first order in ``q - q̄``::

    sum_{j in C} exp(s<q, k_j>)·v_j  ≈  exp(s<q, c> + b_C)·v_C,     b_C = log M - s<q̄, c>

So the mean query sees everything exactly, whatever the blocks; ``near_far`` expands around the mean of *all* queries. A
key that stands for several tokens (``AttentionCall.merged``) counts as often, here and in the region.

**Blocks** are halves of halves: the keys of a head are cut in two at the median along the direction in which they
differ most, again and again. Equal blocks make one batched product of all summaries.

**Cost.** With ``W = N/n`` windows, regions of ``r`` and ``C`` blocks of which ``o`` are opened, about
``N·(r + C + o·N/C + prefix + 1.5·W)`` products of a query and a key. Where softmax itself is no dearer, it
is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2, sqrt

import torch
from torch import Tensor
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.errors import UsageError
from latte_convert.graphs import sizes
from latte_convert.kernels.base import Extras, Kernel, check_whole
from latte_convert.kernels.blocks.attend import Tokens, attend_windows, lowest
from latte_convert.kernels.blocks.members import direction_products
from latte_convert.kernels.blocks.windows import Slices, along_curve, grid_places
from latte_convert.kernels.linear import no_autocast
from latte_convert.kernels.near_far.clustering import BLOCK, take
from latte_convert.kernels.softmax import softmax_attention, softmax_flops


class BlocksKernel(Kernel):
    """Windows, regions and blocks, without parameters to fit; see the module. Neither causal nor cross-attention.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        window: Queries of a window, about. None: 1.75·sqrt(N), 32 at least.
        region: Keys that a window sees one by one, about; its own are among them. None: twice a window.
        blocks: Number of blocks of the other keys: 1, 2, 4, 8, ... None: the largest such number up to 4·sqrt(N).
        opened: Blocks that a window sees key by key, those that its mean query attends to most; ``blocks`` at most.
        **extras: See ``Extras``. ``exact_prefix`` is always on.

    Raises:
        UsageError: A size is out of bounds, or ``blocks`` is no power of two.
    """

    name = "blocks"
    causal_form = False
    cross_form = False
    takes_merged = True
    mixes_queries = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        window: int | None = None,
        region: int | None = None,
        blocks: int | None = None,
        opened: int = 4,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        sizes = {"window": window, "region": region, "blocks": blocks}
        bounds = {name: (1 if size is None else size, 1, 1 << 16) for name, size in sizes.items()}
        check_whole("blocks", {**bounds, "opened": (opened, 0, 1 << 16)})
        if blocks is not None and blocks & (blocks - 1):
            raise UsageError(f"blocks' option `blocks` is {blocks}: set it to a power of two: 1, 2, 4, 8 and so on")
        self.options |= {**sizes, "opened": opened}
        self.exact_prefix = True
        self.window = window
        self.region = region
        self.blocks = blocks
        self.opened = opened

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, or softmax where that is no dearer; float32 inside (float64 for float64 inputs)."""
        if self.is_softmax(call.shape):
            return softmax_attention(call)
        slices, count, opened = self._cut(call.key.shape[2] - call.layout.prefix)
        with no_autocast(call.query.device.type):
            out = _attend(call, slices, count, opened)
        return out if call.mask is None else out.masked_fill(~call.mask.any(-1)[:, None, None, None], 0)

    def is_softmax(self, shape: CallShape) -> bool:
        """Whether windows and blocks would need no fewer FLOPs than softmax."""
        return self._flops(shape) >= softmax_flops(shape)

    def attend_flops(self, shape: CallShape) -> int:
        """Summaries, regions, blocks and prefix; or softmax, where that is no more."""
        return min(self._flops(shape), softmax_flops(shape))

    def _cut(self, tokens: int) -> tuple[Slices, int, int]:
        """Windows of so many tokens behind the prefix, number of blocks, and how many of them are opened."""
        root = sqrt(tokens)
        window = max(32, round(1.75 * root)) if self.window is None else self.window
        blocks = 1 << int(log2(4 * root)) if self.blocks is None else self.blocks
        region = 2 * window if self.region is None else self.region
        return Slices.of(tokens, window, region), blocks, min(self.opened, blocks)

    def _flops(self, shape: CallShape) -> int:
        tokens, prefix = shape.keys - shape.layout.prefix, shape.layout.prefix
        if tokens < 1 or shape.queries != tokens:
            return softmax_flops(shape)
        slices, count, opened = self._cut(tokens)
        size, both = ceil(tokens / count), shape.head_dim + shape.value_dim
        products = direction_products(tokens, count, shape.head_dim)
        products += slices.number * count * size * (shape.head_dim + both)
        products += slices.padded * (slices.region + count + opened * size + prefix) * both
        return 2 * shape.heads * products


def _attend(call: AttentionCall, slices: Slices, count: int, opened: int) -> Tensor:
    """Attention of the queries behind the prefix, ``(B, H, N, dv)``."""
    prefix, (batch, heads, queries, _) = call.layout.prefix, call.query.shape
    wide = torch.promote_types(call.query.dtype, torch.float32)
    order, level = _order(call, slices.tokens), _levels(call, wide)
    token, real = slices.places(order.device)
    line, back = order[:, token].expand(batch, -1), order.argsort(dim=1).expand(batch, -1)
    level = level.expand(batch, -1)
    inner = level[:, prefix:].gather(1, line).masked_fill(~real, lowest(level))
    parts = []
    for samples, some in _groups(call.key):
        many = range(heads)[some]
        at, back_to, along, first = (
            x[samples].repeat_interleave(len(many), dim=0) for x in (line, back, inner, level[:, :prefix])
        )
        query, key, value = (x[samples, some].flatten(0, 1) for x in (call.query, call.key, call.value))
        rows = torch.cat([take(key[:, prefix:], at), take(value[:, prefix:], at)], dim=-1).to(wide)
        alone = torch.cat([key[:, :prefix], value[:, :prefix]], dim=-1).to(wide)
        tokens = Tokens(take(query, at).to(wide), rows, along, alone, first)
        parts.append(take(attend_windows(tokens, slices, count, opened, call.scale), back_to).to(call.query.dtype))
    return torch.cat(parts).reshape(batch, heads, queries, -1)


def _order(call: AttentionCall, tokens: int) -> Tensor:
    """The tokens behind the prefix in the order of the line, ``(B or 1, N)``, int64."""
    plane = call.layout.plane
    if call.merged is not None:
        return along_curve(call.merged.places)
    if plane is not None and plane[0] * plane[1] == tokens:
        return along_curve(grid_places(plane, call.key.device))
    return torch.arange(tokens, device=call.key.device)[None]


def _levels(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """What is added to the logits of each key, ``(B or 1, Nk)``: how often it counts."""
    if call.merged is not None:
        level = call.merged.size.to(dtype).log()
    else:
        level = torch.zeros(1, call.key.shape[2], dtype=dtype, device=call.key.device)
    return level if call.mask is None else level.masked_fill(~call.mask, lowest(level))


def _groups(key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and heads to attend from in one go: on a CPU some heads of one sample, which stay in its cache."""
    batch, heads, keys, head_dim = sizes(key)
    if key.device.type != "cpu" or torch.compiler.is_compiling():
        yield slice(None), slice(None)
        return
    size = ceil(heads / max(1, round(heads * keys * head_dim / BLOCK)))
    for sample in range(batch):
        for first in range(0, heads, size):
            yield slice(sample, sample + 1), slice(first, first + size)
