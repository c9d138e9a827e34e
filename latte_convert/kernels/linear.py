"""Attention by feature maps: the weight of a pair is an inner product of features, so that sums over keys are shared.

``out_i = sum_j <phi(q_i), phi(k_j)>·v_j / sum_j <phi(q_i), phi(k_j)>`` is ``phi(Q)·(phi(K)ᵀV) / phi(Q)·(phi(K)ᵀ1)``
(Katharopoulos et al., "Transformers are RNNs", ICML 2020): O(N·r·dv) for ``r`` features.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.attention import CallShape
from latte_convert.graphs import exporting

# Tokens a causal step handles pairwise. At r = dv = chunk the pairwise block, the running state and the
# values all take the same memory, so nothing larger than the inputs is ever allocated.
CAUSAL_CHUNK = 64


def linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    eps: float = 0.0,
) -> Tensor:
    """Attention whose weights are inner products of features.

    Args:
        query_features: ``(B, H, Nq, r)``.
        key_features: ``(B, H, Nk, r)``.
        value: ``(B, H, Nk, dv)``.
        mask: bool ``(B, Nk)``, True where a key may be attended to.
        causal: Query ``i`` sees only the keys ``j <= i + Nk - Nq``.
        eps: Added to the divisor.

    Returns:
        ``(B, H, Nq, dv)``, float32 (float64 for float64 features), as are the sums, under autocast too; zeros
        where a query sees no key and where the divisor is zero.
    """
    wide = torch.promote_types(query_features.dtype, torch.float32)
    with no_autocast(query_features.device.type):
        query, key, value = query_features.to(wide), key_features.to(wide), value.to(wide)
        if mask is not None:
            key = key * mask[:, None, :, None].to(wide)
        if causal:
            return divided(causal_sums(query, key, value), eps)
        total = key.new_ones(1, 1, 1, key.shape[-2]) @ key
        sums = query @ (key.mT @ value)
        return sums / nonzero(query @ total.mT + eps)


def causal_sums(query: Tensor, key: Tensor, value: Tensor, padding: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Chunked prefix sums: pairwise inside a chunk of ``CAUSAL_CHUNK`` tokens, a running state before it.

    Args:
        query: Features ``(B, H, Nq, r)``.
        key: Features ``(B, H, Nk, r)``, zero where a key is not seen.
        value: ``(B, H, Nk, dv)``.
        padding: One more feature of the queries, ``(B, H, Nq, 1)``, and of the keys, ``(B or 1, 1, Nk, 1)``,
            that spares the copies of a concatenation.

    Returns:
        ``(B, H, Nq, dv + 1)``: the weighted sum of the values that each query sees, and the sum of the weights.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    blind = max(queries - keys, 0)  # leading queries that see no key
    past = max(keys - queries, 0)  # leading keys that every query sees
    value = F.pad(value, (0, 1), value=1.0)  # the last column of every product is the divisor
    q, k, v = chunked(query[..., blind:, :]), chunked(key[..., past:, :]), chunked(value[..., past:, :])
    pairs = q @ k.mT
    rest = q @ before(k.mT @ v, key[..., :past, :].mT @ value[..., :past, :])
    if padding is not None:
        seen = padding[1].expand_as(value[..., :1])
        size, s = chunked(padding[0][..., blind:, :]), chunked(seen[..., past:, :])
        pairs = pairs + size * s.mT
        rest = rest + size * before(s.mT @ v, seen[..., :past, :].mT @ value[..., :past, :])
    return F.pad(joined(pairs.tril() @ v + rest, queries - blind), (0, 0, blind, 0))


def divided(sums: Tensor, eps: float = 0.0) -> Tensor:
    """All columns but the last over the last plus ``eps``; zeros where that divisor is zero."""
    return sums[..., :-1] / nonzero(sums[..., -1:] + eps)


def nonzero(divisor: Tensor) -> Tensor:
    """``divisor`` with infinity for zero: the quotient and its gradients become zero."""
    return divisor.masked_fill(divisor == 0, float("inf"))


def chunked(tokens: Tensor) -> Tensor:
    """``(B, H, N, c)`` to ``(B, H, chunks, CAUSAL_CHUNK, c)``, filled up with zeros."""
    count = tokens.shape[-2]
    # One chunk, or one before the last, would make a graph of its own: an exported one has three at least. The 1 keeps
    # PyTorch from taking the quotient apart, whose multiples it would no longer find to be multiples.
    chunks = (count + 3 * CAUSAL_CHUNK + 1) // CAUSAL_CHUNK if exporting() else -(-count // CAUSAL_CHUNK)
    padded = F.pad(tokens, (0, 0, 0, chunks * CAUSAL_CHUNK - count))
    return torch.unflatten(padded, -2, (chunks, CAUSAL_CHUNK))


def joined(chunks: Tensor, count: int) -> Tensor:
    """The inverse of ``chunked`` on ``count`` tokens."""
    if exporting():  # a view or a slice would ask whether sizes fit, which is not found for all of them
        token = torch.arange(count, device=chunks.device)
        return chunks[:, :, token // CAUSAL_CHUNK, token % CAUSAL_CHUNK]
    return chunks.flatten(2, 3)[..., :count, :]


def before(sums: Tensor, initial: Tensor) -> Tensor:
    """Sum of what precedes each chunk: added up, never subtracted, so that nothing can leak backwards."""
    return torch.cat([initial.unsqueeze(2), sums[:, :, :-1]], dim=2).cumsum(2)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast would undo the float32 of the matmuls; left alone where it is off, for export's sake, and on meta."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def linear_flops(shape: CallShape, features: int, padding: int = 0) -> int:
    """Matmuls of ``linear_attention``, 2 FLOPs per multiply-add; causal, what the chunked prefix sums compute.

    Args:
        shape: The call.
        features: Features of a token, r.
        padding: Number of ``causal_sums``' padding features; without products in a bidirectional form.

    Returns:
        FLOPs on one sample.
    """
    columns = shape.value_dim + 1  # the divisor is one more value column of both products
    if not shape.causal:
        return 2 * (shape.queries + shape.keys) * shape.heads * features * columns
    square = min(shape.queries, shape.keys)
    tokens = -(-square // CAUSAL_CHUNK) * CAUSAL_CHUNK
    past = max(shape.keys - shape.queries, 0)
    inside = CAUSAL_CHUNK * (features + columns)  # query·keyᵀ, then ·value, within a chunk
    states = (2 * features + padding) * columns  # of the keys, and read by the queries
    return 2 * shape.heads * (tokens * (inside + states) + past * (features + padding) * columns)
