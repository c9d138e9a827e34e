"""From what a library passes to its attention to the one description of a call that handlers get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from latte_convert.adapters.layout import SiteLayout
from latte_convert.adapters.masks import key_mask, shared_by_queries
from latte_convert.attention import SiteCall


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
    causal: bool = False,
    triangle: bool = False,
    either: bool = False,
    obstacle: str | None = None,
    dropout: float = 0.0,
) -> SiteCall:
    """Describe a call; what no linear kernel honours becomes its ``obstacle``.

    Args:
        module: The attention module.
        layout: How the tokens of its site lie.
        query: ``(B, H, Nq, d)``.
        key: ``(B, H, Nk, d)``.
        value: ``(B, H, Nk, dv)``.
        exact: Computes the original output ``(B, H, Nq, dv)``.
        scale: Factor on the logits; None is ``d**-0.5``.
        masks: As ``key_mask`` takes them. A key takes part where all of them let it.
        causal: A flag makes the call causal: query i sees the keys up to i, so that without a mask keys beyond the
            queries (the unused part of a static cache) take no part.
        triangle: Whether a mask with a row per query is expected to be causal.
        either: Whether such a mask may also be the opposite, as its values tell; a compiled graph cannot look at them.
        obstacle: What the caller knows already.
        dropout: Dropout of attention weights that the original would apply now.
    """
    obstacle = obstacle or _unlike_heads(query, key)
    queries, keys = query.shape[2], key.shape[2]
    given = [mask for mask in masks if mask is not None]
    if causal and not given and keys > queries:
        keys = queries
    kept = None
    try:
        for mask in given:
            seen, triangular = _read(mask, queries, keys, triangle, either)
            kept, causal = seen if kept is None else kept & seen, causal or triangular
    except ValueError as error:
        obstacle = obstacle or str(error)
    return SiteCall(
        module=module, query=query, key=key[:, :, :keys], value=value[:, :, :keys],
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=None if kept is None else kept.expand(key.shape[0], -1), causal=causal,
        layout=layout.of(queries, keys), exact=exact, obstacle=obstacle, dropout=dropout,
    )  # fmt: skip


def _unlike_heads(query: Tensor, key: Tensor) -> str | None:
    """Why a call is not ``(batch, heads, tokens, channels)`` of as many heads, or None."""
    if query.dim() != 4:
        return "attention inside blocks of tokens"
    return "grouped-query attention" if key.shape[1] != query.shape[1] else None


def _read(mask: Tensor, queries: int, keys: int, triangle: bool, either: bool) -> tuple[Tensor, bool]:
    """Key mask and causality of one mask.

    Raises:
        ValueError: It is more than key padding and causality, or a compiled graph cannot tell.
    """
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
