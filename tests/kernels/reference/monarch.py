"""MonarchAttention by its variational definition, from all pairwise logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from reference.common import widen


def monarch_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    block: int,
    steps: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Alternating maximisation of ``<A, S> + entropy(A)`` over ``A[l, j, k, i] = left[j, l, k]·right[k, j, i]``.

    ``S`` are the logits of query ``j`` in block ``l`` and key ``i`` in block ``k``. For fixed ``left`` the best
    ``right[k, j]`` is the softmax over ``i`` of the mean of ``S[l, j, k, i]`` over ``l``, weighted with ``left``; for
    fixed ``right`` the best ``left[j, l]`` is the softmax over ``k`` of ``<right[k, j], S[l, j, k]>`` plus the entropy
    of ``right[k, j]``. Arguments as in ``latte_convert.kernels.rivals.monarch.MonarchKernel``.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    query_, key_, value_ = widen(query), widen(key), widen(value)
    queries, keys = query.shape[2], key.shape[2]
    total = keys + -keys % block
    q, k, v = (F.pad(tokens, (0, 0, total - tokens.shape[2], 0)) for tokens in (query_, key_, value_))
    seen = torch.ones(len(key), keys, dtype=torch.bool, device=key.device) if mask is None else mask
    asked = F.pad(seen[:, keys - queries :], (total - queries, 0)).reshape(len(key), 1, -1, block)
    seen = F.pad(seen, (total - keys, 0)).reshape(len(key), 1, -1, block)
    shape = (*q.shape[:2], total // block, block, total // block, block)
    logits = (scale * q @ k.mT).reshape(shape)  # (B, H, l, j, k, i)

    left = torch.eye(total // block, dtype=q.dtype, device=q.device).expand(*q.shape[:2], block, -1, -1)
    for step in range(steps):
        weight = left if step == 0 else left * asked.mT[..., None]
        mean = torch.einsum("bhjlk,bhljki->bhkji", weight, logits) / (weight.sum(-2).mT[..., None] + 1e-12 * (step > 0))
        right = mean.masked_fill(~seen[..., None, :], torch.finfo(q.dtype).min).softmax(-1)
        entropy = -(right * right.clamp_min(1e-30).log()).sum(-1)
        gain = torch.einsum("bhkji,bhljki->bhjlk", right, logits) + entropy.mT[..., None, :]
        left = gain.masked_fill(~seen.any(-1)[:, :, None, None], torch.finfo(q.dtype).min).softmax(-1)
    matrix = torch.einsum("bhjlk,bhkji->bhljki", left, right).flatten(4).flatten(2, 3)
    out = (matrix @ v)[:, :, total - queries :]
    return (out * seen.flatten(1).any(-1)[:, None, None, None]).to(query.dtype)
