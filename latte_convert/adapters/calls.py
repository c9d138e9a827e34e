"""From what a library passes to its attention to the one description of a call that handlers get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import add, and_

import torch
from torch import Tensor, nn

from latte_convert.adapters.layout import SiteLayout
from latte_convert.adapters.masks import CarriesBias, key_mask, padding_and_bias, shared_by_queries
from latte_convert.attention import SiteCall

GROUPED = "causal grouped-query attention"


def attention_call(
    module: nn.Module,
    layout: SiteLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exact: Callable[[], Tensor],
    *,
    scale: float | None = None,
    masks: Sequence[Tensor | None] = (),
    bias: Tensor | None = None,
    causal: bool = False,
    triangle: bool = False,
    either: bool = False,
    biased: bool | None = False,
    obstacle: str | None = None,
    dropout: float = 0.0,
) -> SiteCall:
    """Describe a call; what no linear kernel honours becomes its ``obstacle``.

    Args:
        module: The attention module.
        layout: How the tokens of its site lie.
        query: ``(B, H, Nq, d)``.
        key: ``(B, H, Nk, d)``, or with fewer heads, each of which serves as many of the queries'.
        value: ``(B, H, Nk, dv)``, likewise.
        exact: Computes the original output ``(B, H, Nq, dv)``.
        scale: Factor on the logits; None is ``d**-0.5``.
        masks: As ``key_mask`` takes them. A key takes part where all of them let it.
        bias: Added to the logits, ``(B or 1, H or 1, Nq or 1, Nk)``.
        causal: A flag makes the call causal: query i sees the keys up to i, so that without a mask keys beyond the
            queries (the unused part of a static cache) take no part.
        triangle: Whether a mask with a row per query is expected to be causal.
        either: Whether such a mask may also be the opposite, as its values tell; a compiled graph cannot look at them.
        biased: Whether an additive mask is expected to hold a bias where ``bias`` is None; None: as its values tell.
        obstacle: What the caller knows already.
        dropout: Dropout of attention weights that the original would apply now.
    """
    obstacle = obstacle or ("attention inside blocks of tokens" if query.dim() != 4 else None)
    queries, keys = query.shape[2], key.shape[2]
    given = [mask for mask in masks if mask is not None]
    if causal and not given and keys > queries:
        keys = queries
    kept: Tensor | None = None
    added = None if bias is None else bias[..., :keys]
    biased = biased if bias is None else False
    try:
        for mask in given:
            seen, more, triangular = _read(mask, queries, keys, triangle, either, biased)
            kept, added = _joined(kept, seen, and_), _joined(added, more, add)
            causal = causal or triangular
    except ValueError as error:
        obstacle = obstacle or str(error)
    if obstacle is None and key.shape[1] != query.shape[1]:  # heads that share their keys get them each
        if causal or query.shape[1] % key.shape[1]:
            obstacle = GROUPED
        else:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    return SiteCall(
        module=module, query=query, key=key[:, :, :keys], value=value[:, :, :keys],
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=None if kept is None else kept.expand(key.shape[0], -1), causal=causal,
        layout=layout.of(queries, keys), exact=exact, obstacle=obstacle, dropout=dropout,
        bias=added if obstacle is None else None,
    )  # fmt: skip


def _joined(one: Tensor | None, other: Tensor | None, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return join(one, other)


def _read(
    mask: Tensor, queries: int, keys: int, triangle: bool, either: bool, biased: bool | None
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Key mask, bias and causality of one mask.

    Raises:
        ValueError: It is more than these, or a compiled graph cannot tell.
    """
    additive = mask.dim() == 4 and mask.is_floating_point() and mask.shape[-1] >= keys
    if biased and additive:
        return *padding_and_bias(mask, queries=queries, keys=keys), False
    try:
        seen, triangular = _without_bias(mask, queries, keys, triangle, either)
        return seen, None, triangular
    except CarriesBias:
        if biased is None and additive:
            return *padding_and_bias(mask, queries=queries, keys=keys), False
        raise


def _without_bias(mask: Tensor, queries: int, keys: int, triangle: bool, either: bool) -> tuple[Tensor, bool]:
    """Key mask and causality of a mask that is nothing else."""
    if mask.dim() == 2 or (mask.dim() == 4 and shared_by_queries(mask)):
        return key_mask(mask, queries=queries, keys=keys, causal=False), False
    if either and not triangle and torch.compiler.is_compiling():
        raise ValueError("a compiled graph cannot see whether the attention mask is causal: pass is_causal=True")
    try:
        return key_mask(mask, queries=queries, keys=keys, causal=triangle), triangle
    except ValueError:
        if either:
            with suppress(ValueError):
                return key_mask(mask, queries=queries, keys=keys, causal=not triangle), not triangle
        raise
