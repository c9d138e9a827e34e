"""From the masks that libraries build to the two things a linear kernel can honour: key padding and causality."""

from __future__ import annotations

import torch
from torch import Tensor


def key_mask(mask: Tensor | None, *, queries: int, keys: int, causal: bool) -> Tensor | None:
    """Reduce an attention mask to a key mask.

    Args:
        mask: ``(B, Nk)``, or ``(B, 1 or H, 1 or Nq, Nk)`` boolean (True attends) or additive (0 attends), or None.
        queries: Number of queries.
        keys: Number of keys.
        causal: Whether the site is causal, so that a causal triangle in the mask is expected.

    Returns:
        ``(B, Nk)`` boolean, True where a key takes part, or None when every key does.

    Raises:
        ValueError: The mask is more than key padding and causality: a bias, a window, packed sequences.
    """
    if mask is None:
        return None
    allowed = mask.bool() if mask.dim() == 2 else _allowed(mask)
    if allowed.dim() == 2:
        return allowed[:, :keys]
    allowed = allowed[..., :keys]
    # Causal or not, the last query may see every key that is not padding.
    padding = allowed[:, 0, -1, :]
    if not torch.compiler.is_compiling():
        _check(allowed, padding, queries=queries, causal=causal)
    return padding


def _allowed(mask: Tensor) -> Tensor:
    """Boolean form of a 4-D mask, refusing additive masks that carry a bias."""
    if mask.dim() != 4:
        raise ValueError(f"an attention mask of shape {tuple(mask.shape)} is not key padding")
    if mask.dtype == torch.bool:
        return mask
    # Libraries write "masked" as -inf, the dtype's minimum or a large negative constant, and sums of these.
    allowed = mask == 0
    if not torch.compiler.is_compiling() and not bool((allowed | (mask <= -1e4)).all()):
        raise ValueError("the attention mask carries a bias (relative positions?), which has no linear form")
    return allowed


def _check(allowed: Tensor, padding: Tensor, *, queries: int, causal: bool) -> None:
    """Refuse a mask that is not (causal and) key padding. Expanded masks, the usual case, cost O(N)."""
    if allowed.stride(1) == 0 or allowed.shape[1] == 1:
        allowed = allowed[:, :1]
    if allowed.stride(2) == 0 or allowed.shape[2] == 1:
        allowed = allowed[:, :, :1]
        causal = causal and queries > 1 and allowed.shape[2] > 1
    expected = padding[:, None, None, :]
    if causal:
        keys = padding.shape[-1]
        rows = torch.arange(queries, device=padding.device) + (keys - queries)
        expected = expected & (torch.arange(keys, device=padding.device) <= rows[:, None])
    # Rows of padded queries may be empty (fully masked): nobody reads them.
    wrong = (allowed != expected) & allowed.any(-1, keepdim=True)
    if bool(wrong.any()):
        kind = "causal key padding" if causal else "key padding"
        raise ValueError(f"the attention mask is not {kind} (a window, or packed sequences?)")
