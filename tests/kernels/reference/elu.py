"""Linear Transformer, to the letter."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import visible_keys, widen


def elu_reference(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """``Sim_ij = <phi(q_i), phi(k_j)>`` with ``phi(x) = x + 1`` for positive ``x``, else ``exp(x)``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp_max(0).exp()) for x in (widen(query), widen(key)))
    similarity = (phi_q[..., :, None, :] * phi_k[..., None, :, :]).sum(-1) * visible_keys(query, key, mask, causal)
    total = similarity.sum(-1, keepdim=True)
    return (similarity @ widen(value) / total.masked_fill(total == 0, 1)).to(query.dtype)
