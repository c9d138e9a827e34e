"""LATTE, to the letter: every pairwise similarity written out."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import visible_keys, widen


def latte_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor,
    delta_q: Tensor,
    delta_k: Tensor,
    beta_q: Tensor,
    beta_k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    tte: bool = True,
    jpn: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """LATTE with the pairwise ``h'`` and the padded features, to the letter.

    ``psi(x) = (sqrt(scale)·x + m)²`` with ``m = sqrt(1 - alpha)``,
    ``h'_ij = sqrt((|psi(q_i)|+eps)·(|psi(k_j)|+eps))``,
    ``Sim_ij = <[delta_q·psi(q_i)/h'_ij, beta_q], [delta_k·psi(k_j)/h'_ij, beta_k]>``. Arguments as in
    ``latte_convert.kernels.latte.kernel.latte_attention``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    query_, key_, value_ = widen(query), widen(key), widen(value)
    shift = (1 - alpha).sqrt().reshape(-1, 1, 1) if tte else 1.0
    psi_q = (scale**0.5 * query_ + shift) ** 2
    psi_k = (scale**0.5 * key_ + shift) ** 2
    h = torch.ones((), dtype=query_.dtype, device=query.device).expand(*query.shape[:3], key.shape[2])
    if jpn:
        norm_q = torch.linalg.vector_norm(psi_q, dim=-1)[..., :, None]
        norm_k = torch.linalg.vector_norm(psi_k, dim=-1)[..., None, :]
        h = ((norm_q + eps) * (norm_k + eps)).sqrt()
    features_q = delta_q.reshape(-1, 1, 1, 1) * psi_q[..., :, None, :] / h[..., None]
    features_k = delta_k.reshape(-1, 1, 1, 1) * psi_k[..., None, :, :] / h[..., None]
    padded_q = torch.cat([features_q, beta_q.reshape(-1, 1, 1, 1).expand_as(features_q[..., :1])], dim=-1)
    padded_k = torch.cat([features_k, beta_k.reshape(-1, 1, 1, 1).expand_as(features_k[..., :1])], dim=-1)
    similarity = (padded_q * padded_k).sum(-1) * visible_keys(query, key, mask, causal)
    total = similarity.sum(-1, keepdim=True)
    return (similarity @ value_ / total.masked_fill(total == 0, 1)).to(query.dtype)
