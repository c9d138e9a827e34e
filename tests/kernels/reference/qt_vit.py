"""The fixed-centre quadratic expansion's diagonal, to the letter."""

from __future__ import annotations

import math

from torch import Tensor

from reference.common import visible_keys, widen


def qt_vit_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """``Sim_ij = sum_c (q'_ic + 1)²·(k'_jc + 1)² + 1`` with ``x' = sqrt(scale)·x``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    psi_q, psi_k = (math.sqrt(scale) * widen(query) + 1).square(), (math.sqrt(scale) * widen(key) + 1).square()
    similarity = (psi_q[..., :, None, :] * psi_k[..., None, :, :]).sum(-1) + 1
    similarity = similarity * visible_keys(query, key, mask, causal)
    total = similarity.sum(-1, keepdim=True)
    return (similarity @ widen(value) / total.masked_fill(total == 0, 1)).to(query.dtype)
