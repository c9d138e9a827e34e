"""Token merging as a transform of blocks: alike tokens form groups, and go through the next blocks together.

The idea is ToMe's (Bolya et al., ICLR 2023): behind a block its most alike tokens are replaced by their mean, and
attention counts a merged token as often as it has members. It shortens all that a block does, its MLP and projections
too, where a kernel shortens attention alone. Four things differ, so that it is linear in N, needs nothing between
blocks, and every output of a block keeps its shape:

* Partners are sought among ``GROUP`` neighbours along a space-filling curve, not among all tokens. On DINOv2 it is as
  faithful (0.9960 against 0.9959) and costs ``N·GROUP/4`` products instead of ``N²/4``.
* A merged block takes and gives all tokens of the model: it works on the mean of each group. Intermediate features,
  dense heads and hooks see what they expect.
* Each token gets what the block *added* to the mean of its group, and so keeps what tells it from the others. ToMe
  hands all members of a group one value; on DINOv2 that has a fifth more error for patches.
* Which tokens have become one travels with the memory of the block's output. Nothing of a call is kept in a module, so
  threads, replicas and gradient checkpointing see their own.

A call with a mask, or of a block behind something else than a merged block, runs on all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert import compat
from latte_convert.adapters.layout import memory_of
from latte_convert.adapters.route import Route
from latte_convert.attention import Merged, SiteCall, TokenLayout
from latte_convert.errors import CheckpointError, UsageError
from latte_convert.graphs import exporting
from latte_convert.kernels.near_far.clustering import take

GROUP = 64
"""Neighbours along the curve among which a token finds its partner."""
_GROUPS = "latte_groups"  # attribute of the memory of a block's output


class Merge(nn.Module):
    """How many tokens one block runs on, beside the block's own modules: ``<block>.latte``. It has no parameters.

    Args:
        share: Share of the tokens behind the prefix that the block works on, above 0 and at most 1. They are merged at
            the end of the merged block before it: the first of them has 1.

    Raises:
        UsageError: ``share`` is not such a number.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise UsageError(f"a block cannot run on {share!r} of its tokens: give a share above 0, 1 at most")
        self.share = float(share)

    def extra_repr(self) -> str:
        """Settings shown by ``print(model)``."""
        return f"share={self.share}"

    def get_extra_state(self) -> Tensor:
        """The share: a state dict of a hybrid that merges does not fit one that does not."""
        return torch.tensor(self.share, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state dict is of the same share.

        Raises:
            UsageError: It is not.
        """
        if float(state) != self.share:
            raise UsageError(f"this state dict is of a block on {float(state)} of its tokens, this is on {self.share}")


def merges_of(shares: Mapping[str, float]) -> dict[str, Merge]:
    """What ``Host.convert`` takes, of the share of its tokens that each block works on, in order of execution."""
    return {block: Merge(share) for block, share in shares.items()}


@dataclass(frozen=True)
class Groups:
    """Which of ``N0`` tokens of a model go through a block together, in ``N`` groups.

    Attributes:
        prefix: Leading tokens that never merge.
        index: int64 ``(B, N0)``: group of each token.
        merged: Size and place of each group; those behind the prefix lie along the curve.
    """

    prefix: int
    index: Tensor
    merged: Merged

    @classmethod
    def single(cls, layout: TokenLayout, batch: int, tokens: int, device: torch.device) -> Groups:
        """Each token in a group of its own, along the curve."""
        grid = layout.plane or (1, tokens - layout.prefix)
        order = torch.cat([torch.arange(layout.prefix), layout.prefix + _curve(grid)]).to(device)
        index = torch.empty_like(order).scatter_(0, order, torch.arange(tokens, device=device))
        number = order[layout.prefix :] - layout.prefix
        places = torch.stack([number // grid[1], number % grid[1]], dim=-1).float()
        size = torch.ones(batch, tokens, device=device)
        return cls(layout.prefix, index.expand(batch, -1), Merged(size, places.expand(batch, -1, -1)))

    def mean(self, tokens: Tensor) -> Tensor:
        """Mean of each group, ``(B, N, D)``, of all tokens, ``(B, N0, D)``; in float32 inside."""
        wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        size = self.merged.size
        return (_sums(wide, self.index, size.shape[1]) / size[..., None]).to(tokens.dtype)

    def add(self, tokens: Tensor, change: Tensor) -> Tensor:
        """All tokens, ``(B, N0, D)``, each with the change of its group, ``(B, N, D)``."""
        return tokens + take(change, self.index)

    def merge(self, metric: Tensor, left: int) -> Groups:
        """Join the groups most alike by the cosine of ``(B, N, d)``, until ``left`` are behind the prefix.

        At most half of them disappear.
        """
        count = metric.shape[1] - self.prefix
        gone = min(count - left, count // 2)
        if gone <= 0:
            return self
        source, target = (x + self.prefix for x in _pairs(metric[:, self.prefix :].float(), gone))
        stays = torch.ones_like(metric[..., 0], dtype=torch.int64).scatter(1, source, 0)
        new = stays.cumsum(1) - 1
        new = new.scatter(1, source, new.gather(1, target))
        size, places = self.merged.size[..., None], F.pad(self.merged.places, (0, 0, self.prefix, 0))
        whole, places = (_sums(x, new, metric.shape[1] - gone) for x in (size, size * places))
        merged = Merged(whole[..., 0], (places / whole)[:, self.prefix :])
        return Groups(self.prefix, new.gather(1, self.index), merged)


def _sums(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums of the rows ``(B, n, D)`` with the same ``index``, ``(B, n)``: ``(B, count, D)``."""
    batch = rows.shape[0]
    offset = count * torch.arange(batch, device=rows.device)[:, None]
    total = rows.new_zeros(batch * count, rows.shape[2])
    return total.index_add(0, (index + offset).flatten(), rows.flatten(0, 1)).view(batch, count, -1)


def _pairs(metric: Tensor, gone: int) -> tuple[Tensor, Tensor]:
    """Which of ``(B, n, d)`` disappear, and in which others: each ``(B, gone)``.

    Of each group of neighbours every second token may join the most alike of the others.
    """
    count = metric.shape[1]
    metric = F.normalize(F.pad(metric, (0, 0, 0, -count % GROUP)), dim=-1)
    metric = metric.reshape(metric.shape[0], -1, GROUP, metric.shape[2])
    number = torch.arange(metric.shape[1] * GROUP, device=metric.device).view(-1, GROUP)
    alike = metric[:, :, ::2] @ metric[:, :, 1::2].mT
    alike = alike.masked_fill((number[:, 1::2] >= count)[:, None, :], float("-inf"))
    best, nearest = alike.max(-1)
    best = best.masked_fill(number[:, ::2] >= count, float("-inf"))
    # sorted by place, which equal values cannot change
    source = best.flatten(1).topk(gone, dim=1, sorted=False).indices.sort(dim=1).values
    group = source // (GROUP // 2)
    target = GROUP * group + 2 * nearest.flatten(1).gather(1, source) + 1
    return GROUP * group + 2 * (source % (GROUP // 2)), target


def is_block_of(blocks: Collection[str], site: str) -> bool:
    """Whether a site is part of one of some blocks, by their names."""
    return any(site.startswith(f"{block}.") for block in blocks)


@lru_cache(64)
def curve(height: int, width: int) -> Tensor:
    """The numbers of a grid's tokens along a Hilbert curve, ``(height·width,)``: neighbours on it are near.

    A single row is its own curve.
    """
    number = torch.arange(height * width)
    if height == 1 or width == 1:
        return number
    y, x = number // width, number % width
    along = torch.zeros_like(number)
    side = 1 << (max(height, width) - 1).bit_length()
    level = side // 2
    while level:
        right, low = (x & level) > 0, (y & level) > 0
        along += level * level * ((3 * right.long()) ^ low.long())
        flip = ~low
        turned = flip & right
        x, y = torch.where(turned, side - 1 - x, x), torch.where(turned, side - 1 - y, y)
        x, y = torch.where(flip, y, x), torch.where(flip, x, y)
        level //= 2
    return along.argsort()


def _curve(grid: tuple[int, int]) -> Tensor:
    return curve.__wrapped__(*grid) if exporting() else curve(*grid)  # a graph's tensors are of that graph


@dataclass
class _Run:
    """What a merged block and the attention in it tell each other during one call.

    Attributes:
        groups: What the tokens stand for; None where each is one of the model's.
        layout: How the tokens lie, as the attention sees them.
        metric: By what tokens are compared: the mean over heads of the keys, ``(B, N, d)``.
        whole: Whether the call cannot be merged: it has a mask or a bias.
    """

    groups: Groups | None
    layout: TokenLayout | None = None
    metric: Tensor | None = None
    whole: bool = False


_running: ContextVar[_Run | None] = ContextVar("latte_merging", default=None)


@contextmanager
def _run(run: _Run | None) -> Iterator[None]:
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


def met(call: SiteCall) -> SiteCall:
    """A call of a site as it is in a merged block: with what its tokens stand for. Outside of one, the call.

    Raises:
        CheckpointError: The tokens are merged and the call has a mask or a bias.
    """
    run = _running.get() if exporting() or not torch.compiler.is_compiling() else None  # merging is not compiled
    if run is None:
        return call
    odd = call.mask is not None or call.bias is not None or call.obstacle is not None
    run.whole = odd or call.causal or not call.layout.aligned
    run.layout, run.metric = call.layout, call.key.detach().float().mean(1)
    if run.groups is None:
        return call
    if run.whole:
        raise CheckpointError(
            f"an attention layer of {type(call.module).__name__} got merged tokens and a mask or bias, or is no plain "
            "self-attention: convert without --merge."
        )
    return replace(call, merged=run.groups.merged, layout=TokenLayout(run.groups.prefix))


def merged_block(block: nn.Module, route: Route, original: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in the place of the forward of a block: a stand-in as ``route`` takes it; its handler is a ``Step``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        step: Step = route.handlers[max(route.handlers)]  # type: ignore[assignment]
        place, tokens = _tokens(args, kwargs)
        groups = None if step.first else getattr(memory_of(tokens), _GROUPS, None)
        if groups is not None and groups.index.shape != tokens.shape[:2]:
            groups = None
        run = _Run(groups)
        if groups is not None:
            with _versioned(tokens):
                mean = groups.mean(tokens)
            version = compat.version(mean)
            args, kwargs = _put(args, kwargs, place, mean)
        with _run(run):
            output = original(block, *args, **kwargs)
        after = output[0] if isinstance(output, tuple) else output
        if groups is not None:
            if exporting() or version is None or compat.version(mean) != version:
                mean = groups.mean(tokens)  # the block has written into its input
            after = groups.add(tokens, after - mean)
        setattr(memory_of(after), _GROUPS, _after(run, after, step))
        return (after, *output[1:]) if isinstance(output, tuple) else after

    # Which tokens merge depends on their values and travels with memory, which a compiled graph has none of.
    disabled: Callable[..., Any] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return disabled


def _versioned(tokens: Tensor) -> AbstractContextManager[Any]:
    """Where tensors count what is written into them, which those made in inference mode do not."""
    return torch.inference_mode(False) if tokens.is_inference() else nullcontext()


@dataclass(frozen=True)
class Step:
    """A merged block's place among the others, which its route keeps in the place of a handler.

    Attributes:
        first: Whether it is the first of them.
        left: Share of the tokens that the next of them works on; None: it is the last.
        min_tokens: With fewer tokens than this, none merge.
    """

    first: bool
    left: float | None
    min_tokens: int = 0

    def __call__(self, _call: SiteCall) -> Tensor | None:
        """A block makes no calls of its own."""
        return None


def _after(run: _Run, tokens: Tensor, step: Step) -> Groups | None:
    """Which tokens go through the next block together; None where each goes alone."""
    groups, metric = run.groups, run.metric
    if run.layout is None or metric is None or run.whole or step.left is None:
        return None
    if groups is None:
        if tokens.shape[1] < step.min_tokens:
            return None
        groups = Groups.single(run.layout, tokens.shape[0], tokens.shape[1], tokens.device)
        metric = groups.mean(metric)
    left = round(step.left * (tokens.shape[1] - groups.prefix))
    groups = groups.merge(metric, max(left, 1))
    return groups if groups.merged.size.shape[1] < tokens.shape[1] else None


def _tokens(args: Any, kwargs: Any) -> tuple[int | str, Tensor]:
    """Where a block gets its tokens: the first tensor ``(B, N, D)`` among its arguments."""
    for place, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor) and value.dim() == 3:
            return place, value
    raise CheckpointError("a block that merges tokens was called without tokens (B, N, D): convert without --merge.")


def _put(args: Any, kwargs: Any, place: int | str, tokens: Tensor) -> tuple[Any, Any]:
    if isinstance(place, str):
        return args, {**kwargs, place: tokens}
    return (*args[:place], tokens, *args[place + 1 :]), kwargs
