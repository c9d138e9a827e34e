"""EfficientViT's ReLU linear attention, to the letter."""

from __future__ import annotations

from torch import Tensor

from reference.common import visible_keys, widen


def relu_reference(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool = False, eps: float = 1e-15
) -> Tensor:
    """``Sim_ij = <max(q_i, 0), max(k_j, 0)>``; ``eps`` is added to the sum that divides.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    phi_q, phi_k = widen(query).clamp_min(0), widen(key).clamp_min(0)
    similarity = (phi_q[..., :, None, :] * phi_k[..., None, :, :]).sum(-1) * visible_keys(query, key, mask, causal)
    return (similarity @ widen(value) / (similarity.sum(-1, keepdim=True) + eps)).to(query.dtype)
