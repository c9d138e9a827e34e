"""Token merging, what a user might try instead: the idea of ToMe (Bolya et al., ICLR 2023), on any plain ViT.

After each block the ``r`` most similar pairs of tokens become one, their average weighted by how many tokens each
stands for already. Similarity is the cosine of the tokens' keys, averaged over heads; tokens are split alternately in
two sets, and each of the first set may join its nearest of the second. Attention counts a merged token as many times
as it has members (proportional attention). ToMe merges between attention and MLP; here it is after the MLP, so that
blocks of any library can be hooked. Behind the last block each token gets its group's value back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionSite, SiteCall
from latte_convert.errors import CheckpointError


@dataclass
class _Groups:
    """Which tokens have become one, carried from block to block.

    Attributes:
        metric: Keys of the latest attention, mean over heads, ``(B, N, d)``.
        prefix: Leading tokens that never merge.
        size: ``(B, N, 1)``, how many tokens each stands for.
        source: ``(B, N0)``, where each original token is now.
    """

    metric: Tensor
    prefix: int
    size: Tensor
    source: Tensor

    def merge(self, tokens: Tensor, r: int) -> Tensor:
        """Merge ``(B, N, D)`` into ``(B, N - r, D)``."""
        r = min(r, (tokens.shape[1] - self.prefix) // 2)
        if r == 0:
            return tokens
        index = assignment(self.metric, r, self.prefix)
        count = tokens.shape[1] - r
        total = tokens.new_zeros(len(tokens), count, tokens.shape[-1])
        total.scatter_add_(1, index[..., None].expand_as(tokens), tokens * self.size)
        size = self.size.new_zeros(len(tokens), count, 1)
        self.size = size.scatter_add_(1, index[..., None], self.size)
        self.source = index.gather(1, self.source)
        return total / self.size

    def expand(self, tokens: Tensor) -> Tensor:
        """Give each original token the value of its group, ``(B, N0, D)``."""
        return tokens.gather(1, self.source[..., None].expand(-1, -1, tokens.shape[-1]))


def mergeable(sites: Sequence[AttentionSite], towers: set[str]) -> list[AttentionSite]:
    """The self-attention sites of the one tower that tokens are merged in.

    Raises:
        CheckpointError: There is more than one tower, it is not one of vision, or it has fewer than two such sites.
    """
    found = [site for site in sites if site.tower in towers and site.kind == "self" and not site.causal]
    if towers != {"vision"} or len(found) < 2:
        raise CheckpointError("tokens are merged in the self-attention blocks of vision towers only")
    return found


def assignment(metric: Tensor, r: int, prefix: int) -> Tensor:
    """Which new token each token becomes.

    Args:
        metric: ``(B, N, d)``, compared by cosine.
        r: How many tokens disappear, 1 to half of those behind the prefix.
        prefix: Leading tokens that stay.

    Returns:
        Indices ``(B, N)`` into ``N - r`` new tokens: the prefix, the unmerged of the first set, the second set.
    """
    unit = F.normalize(metric[:, prefix:], dim=-1)
    first, second = unit[:, ::2], unit[:, 1::2]
    best, nearest = (first @ second.mT).max(-1)
    order = best.argsort(dim=-1, descending=True)
    kept = first.shape[1] - r
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(len(order[0]), device=order.device).expand_as(order))
    target = torch.where(rank < r, prefix + kept + nearest, prefix + rank - r)
    index = torch.empty(metric.shape[:2], dtype=torch.long, device=metric.device)
    index[:, :prefix] = torch.arange(prefix, device=metric.device)
    index[:, prefix::2] = target
    index[:, prefix + 1 :: 2] = prefix + kept + torch.arange(second.shape[1], device=metric.device)
    return index


class Merger:
    """Merges tokens of the blocks of a tower while its context is open.

    Args:
        host: The model and its adapter.
        sites: The tower's self-attention sites in order of execution, as ``mergeable`` gives them.
        r: How many tokens disappear after each block but the last.
    """

    def __init__(self, host: Host, sites: Sequence[AttentionSite], r: int) -> None:
        self.r = r
        self._host = host
        self._sites = [site.name for site in sites]
        self._blocks = list(dict.fromkeys(host.block(name) for name in self._sites))
        self._groups: _Groups | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Merger:
        first, last = self._sites[0], self._blocks[-1]
        handlers = {name: partial(self._attend, first=name == first) for name in self._sites}
        self._stack.enter_context(self._host.watch(handlers))
        for block in self._blocks:
            hook = partial(self._after, last=block == last)
            self._stack.callback(self._host.model.get_submodule(block).register_forward_hook(hook).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _attend(self, call: SiteCall, *, first: bool) -> Tensor:
        """Exact attention, in which a merged token counts as often as it has members."""
        odd = call.mask is not None or call.bias is not None or call.obstacle is not None
        if odd or not call.layout.aligned:
            raise CheckpointError("token merging takes plain self-attention without a mask or a bias")
        metric = call.key.mean(1)
        if first or self._groups is None:
            rows, tokens = metric.shape[:2]
            source = torch.arange(tokens, device=metric.device).expand(rows, -1)
            self._groups = _Groups(metric, call.layout.prefix, metric.new_ones(rows, tokens, 1), source)
        self._groups.metric = metric
        bias = None if first else self._groups.size.log().mT[:, None]
        return F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=bias, scale=call.scale)

    def _after(self, _module: nn.Module, _args: Any, output: Any, *, last: bool) -> Any:
        if self._groups is None:
            raise CheckpointError("a block ran without calling its attention")
        tokens = output[0] if isinstance(output, tuple) else output
        tokens = self._groups.expand(tokens) if last else self._groups.merge(tokens, self.r)
        return (tokens, *output[1:]) if isinstance(output, tuple) else tokens
