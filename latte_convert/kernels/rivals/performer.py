"""FAVOR+: softmax attention estimated with positive orthogonal random features."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.graphs import recorded
from latte_convert.kernels.base import Extras, Kernel, check_whole
from latte_convert.kernels.linear import chunked, divided, joined, linear_attention, linear_flops, no_autocast

EPS = 1e-6


class PerformerKernel(Kernel):
    """Positive orthogonal random features, an estimate of softmax whose error falls as ``1/sqrt(features)``.

    Choromanski et al., "Rethinking Attention with Performers" (ICLR 2021), lemma 1 and section 2.4. With
    ``x' = sqrt(scale)·x`` and ``phi_w(x) = exp(<w, x'> - |x'|²/2)``, the mean over normal ``w`` of
    ``phi_w(q)·phi_w(k)`` is ``exp(scale·<q, k>)``. The ``w`` are drawn once and stored as ``projection``, ``(r, d)``,
    shared by all heads as in the authors' code.

    A factor per query, and one common to all keys that a query sees, cancel in the division. So exponents are taken
    relative to their largest: of a query, and of all keys that are seen; causal, of those seen so far, where the
    authors' code lets the maximum look ahead. Its constant ``EPS`` against underflow is added to the features of
    queries only: no weight then depends on keys that are not seen.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        features: Number of random features; by default ``d·ln d``, the number that the paper's theorem 4 asks for.
        seed: Of the draw.
        **extras: See ``Extras``.

    Raises:
        UsageError: ``features`` is not 1 to 2^14, or ``seed`` not a seed of PyTorch.
    """

    name = "performer"
    causal_form = True
    projection: Tensor

    def __init__(
        self, heads: int, head_dim: int, *, features: int | None = None, seed: int = 0, **extras: Unpack[Extras]
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        if features is None:
            features = max(1, int(head_dim * math.log(head_dim)))
        check_whole("performer", {"features": (features, 1, 1 << 14), "seed": (seed, 0, (1 << 63) - 1)})
        self.features = features
        self.options |= {"features": features, "seed": seed}
        self.register_buffer("projection", orthogonal_features(features, head_dim, seed))

    def attend(self, call: AttentionCall) -> Tensor:
        """All arithmetic is float32 (float64 for float64 inputs), under autocast too."""
        query, key, value, scale = call.query, call.key, call.value, call.scale
        wide = torch.promote_types(query.dtype, torch.float32)
        with no_autocast(query.device.type):
            directions = (scale**0.5 * self.projection.to(wide)).mT
            exponent = query.to(wide) @ directions
            query_features = _exponential(exponent, exponent.amax(-1, keepdim=True), EPS)
            tokens = key.to(wide)
            exponent = tokens @ directions - scale / 2 * tokens.square().sum(-1, keepdim=True)
            if call.mask is not None:
                exponent = exponent.masked_fill(~call.mask[:, None, :, None], -math.inf)
            # Finite where no key is seen: infinity less infinity would be NaN.
            top = exponent.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(wide).min)
            if call.causal:
                out = divided(_causal_sums(query_features, _exponential(exponent, top), top, value.to(wide)))
            else:
                out = linear_attention(query_features, _exponential(exponent, top.amax(-2, keepdim=True)), value)
        return out.to(query.dtype)

    def attend_flops(self, shape: CallShape) -> int:
        """The projections, and ``linear_flops``."""
        projections = 2 * (shape.queries + shape.keys) * shape.heads * self.features * shape.head_dim
        return projections + linear_flops(shape, self.features)


def orthogonal_features(features: int, dim: int, seed: int) -> Tensor:
    """``(features, dim)``, float32: each row is normal, and the rows of each block of ``dim`` are orthogonal.

    The directions of a block are those of a random rotation; the lengths are those of independent normal vectors.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    q, r = torch.linalg.qr(normal(-(-features // dim), dim, dim))
    # QR leaves the signs to its implementation; with those of R's diagonal the rotation is uniform.
    directions: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).mT.reshape(-1, dim)
    lengths: Tensor = torch.linalg.vector_norm(normal(features, dim), dim=-1, keepdim=True)
    return (directions[:features] * lengths).to(torch.float32)


def _exponential(exponent: Tensor, top: Tensor, plus: float = 0.0) -> Tensor:
    """``exp(exponent - top) + plus``."""
    if recorded(exponent):
        return (exponent - top).exp() + plus
    # In place unless autograd holds on to it: fresh memory costs more here than arithmetic.
    return exponent.sub_(top).exp_().add_(plus)


def _causal_sums(query: Tensor, key: Tensor, top: Tensor, value: Tensor) -> Tensor:
    """``linear.causal_sums`` of the key features ``key·exp(top)``, each row relative to the largest ``top`` it sees.

    Args:
        query: ``(B, H, Nq, r)``.
        key: ``(B, H, Nk, r)``, at most 1.
        top: Logarithm of what each key's features are to be multiplied by, ``(B, H, Nk, 1)``.
        value: ``(B, H, Nk, dv)``.

    Returns:
        ``(B, H, Nq, dv + 1)``.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    blind = max(queries - keys, 0)  # leading queries that see no key
    past = max(keys - queries, 0)  # leading keys that every query sees
    value = F.pad(value, (0, 1), value=1.0)  # the last column of every product is the divisor
    largest = F.pad(top.cummax(-2).values, (0, 0, 1, 0), value=torch.finfo(top.dtype).min)  # [j]: of the keys before j
    q, k, v = chunked(query[..., blind:, :]), chunked(key[..., past:, :]), chunked(value[..., past:, :])
    own, seen = chunked(top[..., past:, :]), chunked(largest[..., past + 1 :, :])
    start = largest[..., past : past + 1, :]
    state = (key[..., :past, :] * _ratio(top[..., :past, :], start)).mT @ value[..., :past, :]
    sums = (k * _ratio(own, seen[..., -1:, :])).mT @ v  # of each chunk, relative to the largest at its end
    states, starts = [state], [start]
    for chunk in range(q.shape[2] - 1):
        end = seen[:, :, chunk, -1:]
        states.append(states[-1] * _ratio(starts[-1], end) + sums[:, :, chunk])
        starts.append(end)
    pairs = (q @ k.mT * _ratio(own.mT, seen)).tril()
    rest = q @ torch.stack(states[: q.shape[2]], dim=2) * _ratio(torch.stack(starts[: q.shape[2]], dim=2), seen)
    return F.pad(joined(pairs @ v + rest, queries - blind), (0, 0, blind, 0))


def _ratio(log_part: Tensor, log_whole: Tensor) -> Tensor:
    """``exp(log_part - log_whole)``, at most 1: what would be more is in the future or in a chunk's filling."""
    return (log_part - log_whole).clamp_max(0).exp()
