"""Polarity-aware attention, channel by channel: what has the same sign attends to one half of the values."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import visible_keys, widen


def pola_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    power: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """``Sim_ij = sum_c |scale·q_ic·k_jc| ** power_c`` over the channels whose product is positive, or negative.

    The first half of the value channels is averaged with the former, the rest with the latter. Arguments as in
    ``latte_convert.kernels.rivals.pola.PolaKernel``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where no weight is left.
    """
    product = scale * widen(query)[..., :, None, :] * widen(key)[..., None, :, :]  # (B, H, Nq, Nk, d)
    strength = product.abs() ** power[:, None, None]
    visible = visible_keys(query, key, mask, causal)
    outputs = []
    for chosen, half in zip((product > 0, product < 0), widen(value).tensor_split(2, dim=-1), strict=True):
        similarity = (strength * chosen).sum(-1) * visible
        total = similarity.sum(-1, keepdim=True)
        outputs.append(similarity @ half / total.masked_fill(total == 0, 1))
    return torch.cat(outputs, dim=-1).to(query.dtype)
