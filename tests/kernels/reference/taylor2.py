"""The second-order expansion of softmax, to the letter."""

from __future__ import annotations

from torch import Tensor

from reference.common import visible_keys, widen


def taylor2_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """``Sim_ij = e^alpha·(1 + (x - alpha) + (x - alpha)²/2)`` of the logits ``x = scale·<q_i, k_j>``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    anchor = alpha.reshape(-1, 1, 1)
    distance = scale * widen(query) @ widen(key).mT - anchor
    similarity = anchor.exp() * (1 + distance + distance**2 / 2) * visible_keys(query, key, mask, causal)
    total = similarity.sum(-1, keepdim=True)
    return (similarity @ widen(value) / total.masked_fill(total == 0, 1)).to(query.dtype)
