"""FAVOR+ attention, every pair and feature written out, in logarithms."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import visible_keys, widen


def performer_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    projection: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """``Sim_ij = sum_w phi_w(q_i)·phi_w(k_j)`` with ``phi_w(x) = exp(<w, x'> - |x'|²/2)``, ``x' = sqrt(scale)·x``.

    The features of a query are divided by its largest, and ``eps`` is added to them.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    q, k, w = scale**0.5 * widen(query), scale**0.5 * widen(key), projection.to(widen(query).dtype)
    log_q = q @ w.mT
    log_q = torch.logaddexp(log_q - log_q.amax(-1, keepdim=True), torch.tensor(eps, dtype=q.dtype).log())
    log_k = k @ w.mT - (k**2).sum(-1, keepdim=True) / 2
    logits = torch.logsumexp(log_q[..., :, None, :] + log_k[..., None, :, :], dim=-1)
    visible = visible_keys(query, key, mask, causal)
    weights = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).softmax(-1) * visible
    return (weights @ widen(value)).to(query.dtype)
