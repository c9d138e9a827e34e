"""The ways of computing the converted sites that are compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from latte_convert.attention import AttentionCall
from latte_convert.bench.inputs import Case
from latte_convert.bench.merging import Merger, mergeable
from latte_convert.bench.result import VariantName
from latte_convert.bench.timing import Timed, measure
from latte_convert.errors import CheckpointError
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.softmax import softmax_flops

POOLING = 2
"""Keys and values are averaged over this many tokens in height and width, or over its square in a sequence."""
_HALVINGS = 5


@dataclass(frozen=True)
class Variant:
    """One way of computing the converted sites.

    Attributes:
        name: What the report calls it.
        install: Turns the model into it for the time of the context.
        kernels: The kernel of each site, for measuring attention alone; empty where that cannot be told apart.
        compiled: Whether the kernels are compiled.
        detail: Its settings.
    """

    name: VariantName
    install: Callable[[], AbstractContextManager[Any]]
    kernels: Mapping[str, Kernel]
    compiled: bool = False
    detail: str = ""


def original(kernels: Mapping[str, Kernel]) -> Variant:
    """The model as it is; its attention alone is PyTorch's SDPA, which picks flash attention where it can."""
    exact = {name: ExactKernel(kernel.heads, kernel.head_dim) for name, kernel in kernels.items()}
    return Variant("original", nullcontext, exact)


def hybrid(case: Case, kernels: Mapping[str, Kernel], *, min_tokens: int = 0) -> Variant:
    """The artifact as it is loaded, by default without an exact branch for short sequences.

    Where it merges tokens, its attention runs on fewer of them than the original's: it cannot be measured alone.
    """
    install = partial(case.host.convert, {**kernels, **case.merges}, min_tokens=min_tokens)
    return Variant("hybrid", install, {} if case.merges else kernels, detail=_merging(case))


def _merging(case: Case) -> str:
    left = min((merge.share for merge in case.merges.values()), default=1.0)
    return f"tokens merged to {left:.0%}" if case.merges else ""


def compiled(case: Case, kernels: Mapping[str, Kernel], calls: Mapping[str, list[AttentionCall]]) -> Variant:
    """The hybrid with its kernels compiled for the shapes of one length; the rest of the model stays eager.

    ``fullgraph``, because PyTorch would otherwise run what it cannot compile eagerly, without a word.

    Raises:
        CheckpointError: The hybrid merges tokens, or its kernels ask which tokens are padding: both run eagerly.
    """
    if case.merges:
        raise CheckpointError("blocks whose tokens are merged run eagerly: there is nothing to compile")
    masked = (kernels[name] for name, found in calls.items() if any(call.mask is not None for call in found))
    if left := next((kernel.name for kernel in masked if kernel.mixes_queries), None):
        raise CheckpointError(f"{left} leaves a compiled graph where a call has a padding mask, as these inputs do")
    torch.compiler.reset()  # what was compiled for another length counts towards its limit of recompilations
    fast: dict[str, Any] = {name: torch.compile(k, dynamic=False, fullgraph=True) for name, k in kernels.items()}
    install = partial(case.host.watch, fast)
    return Variant("hybrid_compiled", install, fast, compiled=True, detail="kernels only")


def pooled(case: Case, kernels: Mapping[str, Kernel], calls: Mapping[str, list[AttentionCall]]) -> Variant:
    """Exact attention to pooled keys and values, at the sites that are converted.

    Raises:
        UsageError: A site has no form of it.
        CheckpointError: It takes no fewer operations than exact attention, which then runs in its place.
    """
    from latte_convert.kernels.registry import get_kernel

    near_far: Any = get_kernel("near_far")
    pools: dict[str, Kernel] = {}
    for name, kernel in kernels.items():
        layout = calls[name][0].layout
        keys = calls[name][0].key.shape[2]
        height, width = layout.plane or (keys - layout.prefix, 1)
        clusters = -(-height // POOLING) * -(-width // POOLING) if layout.grid else -(-height // POOLING**2)
        pools[name] = near_far(kernel.heads, kernel.head_dim, window=0, halo=0, far="pooled", clusters=max(clusters, 1))
    shapes = {name: calls[name][0].shape for name in pools}
    if sum(pools[n].flops(s) for n, s in shapes.items()) >= sum(softmax_flops(s) for s in shapes.values()):
        raise CheckpointError("pooling keys and values saves nothing at this length")
    install = partial(case.host.convert, pools)
    detail = f"keys and values averaged by {POOLING}x{POOLING}"
    return Variant("pooled", install, pools, detail=detail)


def merged(case: Case, kernels: Mapping[str, Kernel], tokens: int, device: torch.device) -> Variant:
    """Token merging in the tower of the converted sites, with ``r`` such that a forward takes as long as the hybrid's.

    Args:
        case: The length.
        kernels: The converted sites.
        tokens: Number of tokens before any is merged.
        device: Where the model runs.

    Raises:
        CheckpointError: The model cannot have its tokens merged, or no ``r`` gives that time.
    """
    sites = case.host.sites()
    chosen = mergeable(sites, {site.tower for site in sites if site.name in kernels})

    def took(context: Callable[[], AbstractContextManager[Any]]) -> float:
        return measure(Timed(partial(case.host.run, case.inputs[0]), context), device)

    def merger(r: int) -> Callable[[], AbstractContextManager[Any]]:
        return partial(Merger, case.host, chosen, r)

    turns = [(took(nullcontext), took(hybrid(case, kernels).install)) for _ in range(3)]
    original_seconds, budget = (min(seconds) for seconds in zip(*turns, strict=True))
    if original_seconds <= budget:
        raise CheckpointError("the hybrid is not faster than the original here: there is no speed to match")
    fewest, most = 1, max(tokens // 2, 1)
    if took(merger(most)) > budget:
        raise CheckpointError("merging half of the tokens after each block is not as fast as the hybrid")
    for _ in range(_HALVINGS):
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if took(merger(middle)) <= budget else (middle, most)
    return Variant("merged", merger(most), {}, detail=f"r = {most} tokens a block, for the hybrid's speed")
