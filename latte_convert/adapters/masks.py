"""From the masks that libraries build to what a linear kernel can honour: key padding and causality."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e4
"""What is added to a logit to hide a key, or less: -inf, the dtype's minimum, a large constant, and sums of these."""


class CarriesBias(ValueError):
    """A mask adds something to the logits of keys that it does not hide."""


def shared_by_queries(mask: Tensor) -> bool:
    """Whether a 4-D mask says the same of every query, told from its shape and strides alone."""
    return mask.shape[2] == 1 or mask.stride(2) == 0


def key_mask(mask: Tensor, *, queries: int, keys: int, causal: bool) -> Tensor:
    """Reduce an attention mask to a key mask.

    A mask that is expanded over the queries, the usual case of key padding, is read through one row: O(Nk).
    In a compiled graph the mask's values cannot be looked at: there, only shapes and dtypes are checked.

    Args:
        mask: ``(B or 1, Nk)``, or ``(B or 1, 1 or H, 1 or Nq, Nk)`` boolean (True attends) or additive (0
            attends). Keys beyond ``keys`` are dropped.
        queries: Number of queries.
        keys: Number of keys.
        causal: Whether a mask with a row per query is to hold a causal triangle, ``j <= i + keys - queries``.

    Returns:
        ``(B or 1, Nk)`` boolean, True where a key takes part.

    Raises:
        ValueError: The mask is more than key padding and causality: a bias, a window, packed sequences.
    """
    if mask.dim() not in (2, 4) or mask.shape[-1] < keys:
        raise ValueError(f"an attention mask of shape {tuple(mask.shape)} is not key padding for {keys} keys")
    mask = mask[..., :keys]
    if mask.dim() == 2:
        return mask.bool()
    if shared_by_queries(mask):
        mask, causal = mask[:, :, :1], False
    allowed = _allowed(mask)
    # Keys that some query sees; rows of padded queries may be empty.
    padding = allowed[:, 0].any(dim=1)
    if not torch.compiler.is_compiling():
        _check(allowed, padding, queries=queries, causal=causal)
    return padding


def padding_and_bias(mask: Tensor, *, queries: int, keys: int) -> tuple[Tensor | None, Tensor]:
    """Divide an additive mask with a bias into a key mask and the bias.

    Args:
        mask: ``(B or 1, 1 or H, 1 or Nq, Nk)``. Keys beyond ``keys`` are dropped.
        queries: Number of queries.
        keys: Number of keys.

    Returns:
        ``(B or 1, Nk)`` boolean, None where no key is hidden; and the bias, 0 for hidden keys.

    Raises:
        ValueError: Keys are hidden from some queries only: a window, packed sequences.
    """
    mask = mask[..., :keys]
    if shared_by_queries(mask):
        mask = mask[:, :, :1]
    seen = mask > HIDDEN
    if torch.compiler.is_compiling():
        return seen.flatten(1, 2).any(1), mask.masked_fill(~seen, 0)
    if bool(seen.all()):
        return None, mask
    padding = seen.flatten(1, 2).any(1)
    _check(seen, padding, queries=queries, causal=False)
    return padding, mask.masked_fill(~seen, 0)


def _allowed(mask: Tensor) -> Tensor:
    """Boolean form of a 4-D mask, refusing additive masks that carry a bias."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"a 4-D attention mask of {mask.dtype} is neither boolean nor additive")
    allowed = mask == 0
    if not torch.compiler.is_compiling() and not bool((allowed | (mask <= HIDDEN)).all()):
        raise CarriesBias("the attention mask carries a bias (relative positions?) that is not expected here")
    return allowed


def _check(allowed: Tensor, padding: Tensor, *, queries: int, causal: bool) -> None:
    """Refuse a mask that is not (causal and) key padding."""
    expected = padding[:, None, None, :]
    if causal:
        keys = padding.shape[-1]
        last = torch.arange(queries, device=padding.device) + (keys - queries)
        expected = expected & (torch.arange(keys, device=padding.device) <= last[:, None])
    # Rows of padded queries may be empty (fully masked): they are never read.
    wrong = (allowed != expected) & allowed.any(-1, keepdim=True)
    if bool(wrong.any()):
        kind = "causal key padding" if causal else "key padding"
        raise ValueError(f"the attention mask is not {kind} (a window, or packed sequences?)")
