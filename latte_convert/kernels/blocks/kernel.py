"""blocks: softmax attention that sees nearby keys and the prefix one by one, and the rest in blocks.

A query sees three kinds of columns under *one* softmax:

* the **prefix** (CLS, registers), key by key;
* its **region**, key by key: tokens lie along a curve that keeps neighbours together, a Hilbert curve on a grid and the
  text itself in a sequence. A slice of it is a window of queries, and a longer slice around that is their region;
* **blocks**, one column for each: equal numbers of keys that are alike, less the members in the region.

**A block's column** is made for each window. What is wanted of the members ``C`` outside the region is
``sum_{j in C} exp(s<q, k_j>)·v_j`` for all queries ``q`` of a window, which are near to each other. Around their mean
``q̄``, with the weights ``p_j = exp(s<q̄, k_j>) / M`` where ``M = sum_{j in C} exp(s<q̄, k_j>)``, put ``c = sum p_j·k_j``
and ``v_C = sum p_j·v_j``. To first order in ``q - q̄``::

    sum_{j in C} exp(s<q, k_j>)·v_j  ≈  exp(s<q, c> + b_C)·v_C,     b_C = log M - s<q̄, c>

So the mean query sees everything exactly, whatever the blocks; ``near_far`` expands around the mean of *all* queries. A
key that stands for several tokens (``AttentionCall.merged``) counts as often, here and in the region.

**Blocks** are halves of halves: the keys of a head are cut in two at the median along the direction in which they
differ most, again and again. Equal blocks make one batched product of all summaries.

**Cost.** With ``W = N/n`` windows, regions of ``r`` and ``C`` blocks, ``N·(r + C + prefix + 1.5·W)`` products of a
query and a key. Where softmax itself is no dearer, it is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.errors import UsageError
from latte_convert.graphs import sizes
from latte_convert.kernels.base import Extras, Kernel, check_whole
from latte_convert.kernels.blocks.attend import Tokens, attend_windows, lowest
from latte_convert.kernels.blocks.members import block_products
from latte_convert.kernels.blocks.windows import Slices, along_curve, grid_places
from latte_convert.kernels.linear import no_autocast
from latte_convert.kernels.near_far.clustering import BLOCK, take
from latte_convert.kernels.softmax import softmax_attention, softmax_flops


class BlocksKernel(Kernel):
    """Windows, regions and blocks, without parameters to fit; see the module. Neither causal nor cross-attention.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        window: Queries of a window, about.
        region: Keys that a window sees one by one, about; its own are among them.
        blocks: Number of blocks of the other keys: 1, 2, 4, 8, ... None: follows from the number of tokens.
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
        window: int = 128,
        region: int = 256,
        blocks: int | None = None,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        sizes = {"window": (window, 1, 1 << 16), "region": (region, 1, 1 << 16)}
        check_whole("blocks", {**sizes, "blocks": (1 if blocks is None else blocks, 1, 1 << 16)})
        if blocks is not None and blocks & (blocks - 1):
            raise UsageError(f"blocks' option `blocks` is {blocks}: set it to a power of two: 1, 2, 4, 8 and so on")
        self.options |= {"window": window, "region": region, "blocks": blocks}
        self.exact_prefix = True
        self.window = window
        self.region = region
        self.blocks = blocks

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, or softmax where that is no dearer; float32 inside (float64 for float64 inputs)."""
        if self.is_softmax(call.shape):
            return softmax_attention(call)
        prefix, keys = call.layout.prefix, call.key.shape[2]
        slices = Slices.of(keys - prefix, self.window, self.region)
        with no_autocast(call.query.device.type):
            out = _attend(call, slices, self._count(keys))
        return out if call.mask is None else out.masked_fill(~call.mask.any(-1)[:, None, None, None], 0)

    def is_softmax(self, shape: CallShape) -> bool:
        """Whether windows and blocks would need no fewer FLOPs than softmax."""
        return self._flops(shape) >= softmax_flops(shape)

    def attend_flops(self, shape: CallShape) -> int:
        """Cutting the keys, summaries, regions, blocks and prefix; or softmax, where that is no more."""
        return min(self._flops(shape), softmax_flops(shape))

    def _count(self, keys: int) -> int:
        """Number of blocks of so many keys."""
        return 256 if self.blocks is None else self.blocks

    def _flops(self, shape: CallShape) -> int:
        tokens = shape.keys - shape.layout.prefix
        if tokens < 1 or shape.queries != tokens:
            return softmax_flops(shape)
        slices, count = Slices.of(tokens, self.window, self.region), self._count(shape.keys)
        rows, both = ceil(tokens / count) * count, shape.head_dim + shape.value_dim
        products = block_products(tokens, count, shape.head_dim)
        products += slices.number * (rows * (shape.head_dim + both) + count * shape.head_dim)
        products += slices.padded * (slices.region + count + shape.layout.prefix) * both
        return 2 * shape.heads * products


def _attend(call: AttentionCall, slices: Slices, count: int) -> Tensor:
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
        tokens = Tokens(
            *(
                take(query, at).to(wide),
                take(key[:, prefix:], at).to(wide),
                take(value[:, prefix:], at).to(wide),
                along,
            ),
            *(key[:, :prefix].to(wide), value[:, :prefix].to(wide), first),
        )
        parts.append(take(attend_windows(tokens, slices, count, call.scale), back_to).to(call.query.dtype))
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
