"""Fitted feature maps, to the letter: every pairwise similarity written out."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import visible_keys, widen


def fitted_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    query_bias: Tensor,
    key_bias: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """``Sim_ij = <softmax([y_i, -y_i]), softmax([z_j, -z_j])>`` with ``y = sqrt(scale)·q W_q + b_q``, ``z`` alike.

    Arguments as in ``latte_convert.kernels.rivals.fitted.FittedKernel``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    y = torch.einsum("bhnd,hdf->bhnf", scale**0.5 * widen(query), query_weight) + query_bias
    z = torch.einsum("bhnd,hdf->bhnf", scale**0.5 * widen(key), key_weight) + key_bias
    features_q, features_k = (x.exp() / x.exp().sum(-1, keepdim=True) for x in map(_signed, (y, z)))
    similarity = torch.einsum("bhif,bhjf->bhij", features_q, features_k) * visible_keys(query, key, mask, causal)
    total = similarity.sum(-1, keepdim=True)
    return (similarity @ widen(value) / total.masked_fill(total == 0, 1)).to(query.dtype)


def _signed(x: Tensor) -> Tensor:
    return torch.cat([x, -x], dim=-1)
