"""MonarchAttention: softmax attention projected onto block-structured (Monarch) matrices."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.errors import UsageError
from latte_convert.kernels.base import Extras, Kernel, check_whole
from latte_convert.kernels.linear import no_autocast


class MonarchKernel(Kernel):
    r"""Softmax attention projected onto Monarch matrices: O(N·(block + N/block)·d), O(N·sqrt(N)·d) at best.

    Softmax attention is the matrix ``A``, rows on the simplex, that maximises ``<A, S> + entropy(A)`` for the
    logits ``S``. MonarchAttention (Yaras et al., NeurIPS 2025) seeks it among the matrices whose entry for the
    ``j``-th query of block ``l`` and the ``i``-th key of block ``k`` is ``left[j, l, k]·right[k, j, i]``: the
    query shares its weight out among blocks, and inside a block all queries at position ``j`` agree. From
    ``left = identity`` it maximises over ``right`` and ``left`` in turn, each time in closed form::

        mean[k, j]     = sum_l left[j, l, k]·q[l, j] / sum_l left[j, l, k]      q[k, j] in the first step
        right[k, j, :] = softmax_i <mean[k, j], k[k, i]>                        with log-sum-exp lse[k, j]
        left[j, l, :]  = softmax_k (lse[k, j] + <q[l, j] - mean[k, j], sum_i right[k, j, i]·k[k, i]>)

    The paper writes the logit of ``left`` with the entropy of ``right``; this is the same number, and says what
    it is: the log-sum-exp of a block, continued from the mean query to the query along its tangent. A block's mass
    is thus never overestimated, and is exact for the mean query. One block, or blocks of one token,
    give softmax itself.

    Tokens are padded in front to full blocks, as in the authors' experiments on images, which leaves the prefix
    to the first block. Query ``i`` belongs with key ``i + Nk - Nq``. A padded query is zeros, which see the plain mean
    of a block; padded and masked tokens count in no later step. Unlike in the authors' code, a block that
    is masked entirely has no weight, and a block of logits far below zero does not underflow.

    As blocks pair each query with the key in its place, there is neither a causal nor a cross form.

    Args:
        heads: Number of heads.
        head_dim: Channels per head of query, key and value.
        block: Tokens in a block; None: the width of the grid where that is within a factor 2 of ``sqrt(Nk)``,
            otherwise ``sqrt(Nk)``. On a grid a block is then a row, as padding goes in front.
        steps: Alternating steps, 1 to 100.
        **extras: See ``Extras``.

    Raises:
        UsageError: ``block`` is not 1 to 2^20, or ``steps`` not 1 to 100.
    """

    name = "monarch"
    causal_form = False
    cross_form = False
    mixes_queries = True

    def __init__(
        self, heads: int, head_dim: int, *, block: int | None = None, steps: int = 1, **extras: Unpack[Extras]
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        check_whole("monarch", {"steps": (steps, 1, 100), "block": (1 if block is None else block, 1, 1 << 20)})
        self.options |= {"block": block, "steps": steps}
        self.block = block
        self.steps = steps

    def attend(self, call: AttentionCall) -> Tensor:
        """All arithmetic is float32 (float64 for float64 inputs), under autocast too.

        Raises:
            UsageError: There are more queries than keys.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        queries, keys = query.shape[2], key.shape[2]
        if queries > keys:
            raise UsageError(f"monarch pairs queries with keys, but there are {queries} queries and {keys} keys")
        block = self._block(call.shape)
        blocks = ceil(keys / block)
        wide = torch.promote_types(query.dtype, torch.float32)
        with no_autocast(query.device.type):
            q, k, v = (_blocked(tokens.to(wide), blocks, block) for tokens in (query, key, value))
            seen = mask if mask is not None else key.new_ones(1, keys, dtype=torch.bool)
            asked = _blocked(seen[:, None, keys - queries :, None], blocks, block)
            seen = _blocked(seen[:, None, :, None], blocks, block)
            out = _alternate(q * call.scale, k, v, seen, asked, self.steps)[:, :, blocks * block - queries :]
            if mask is not None:
                out = out.masked_fill(~mask.any(-1)[:, None, None, None], 0)
        return out.to(query.dtype)

    def attend_flops(self, shape: CallShape) -> int:
        """Both factors of every step and their products with the values, padding included."""
        block = self._block(shape)
        blocks = ceil(shape.keys / block)
        inside = blocks * block * block  # entries of one factor: block² for each block of keys,
        across = block * blocks * blocks  # and of the other: blocks² for each position in a block
        channels = self.steps * (2 * inside + across) * shape.head_dim  # logits and mean keys; logits
        means = (self.steps - 1) * across * shape.head_dim
        return 2 * shape.heads * (channels + means + (inside + across) * shape.value_dim)

    def _block(self, shape: CallShape) -> int:
        if self.block is not None:
            return min(self.block, shape.keys)
        root, grid = round(sqrt(shape.keys)), shape.layout.plane
        if grid is not None and root <= 2 * grid[1] <= 4 * root:
            return grid[1]
        return root


def _blocked(tokens: Tensor, blocks: int, block: int) -> Tensor:
    """``(B, H, N, c)`` to ``(B, H, blocks, block, c)``, filled up with zeros in front."""
    padded = F.pad(tokens, (0, 0, blocks * block - tokens.shape[2], 0))
    return padded.reshape(*tokens.shape[:2], blocks, block, tokens.shape[3])


def _alternate(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, asked: Tensor, steps: int) -> Tensor:
    """Attention output ``(B, H, blocks·block, dv)``.

    Query, key and value are blocked, the query scaled; ``seen`` and ``asked``, ``(B or 1, 1, blocks, block, 1)``,
    tell which keys may be attended to and which queries count in the means.
    """
    mean_query, across = query, query.transpose(2, 3).contiguous()
    empty = ~seen.any(-2)[:, :, None, None, :, 0]  # (B or 1, 1, 1, 1, blocks)
    lowest = torch.finfo(query.dtype).min
    for step in range(steps):
        inside = (mean_query @ key.mT).masked_fill_(~seen.mT, lowest)
        mass = inside.logsumexp(-1, keepdim=True)
        right = (inside - mass).exp_()
        mean_key = right @ key
        offset = mass - (mean_query * mean_key).sum(-1, keepdim=True)
        logits = (across @ mean_key.transpose(2, 3).mT).add_(offset.transpose(2, 3).mT)
        left = logits.masked_fill_(empty, lowest).softmax(-1)
        if step + 1 < steps:
            weight = (left * asked.transpose(2, 3)).mT
            # The authors' floor: where no query looks at a block, its mean query fades to zero.
            mean_query = (weight @ across / (weight.sum(-1, keepdim=True) + 1e-12)).transpose(2, 3)
    return (left @ (right @ value).transpose(2, 3)).transpose(2, 3).flatten(2, 3)
