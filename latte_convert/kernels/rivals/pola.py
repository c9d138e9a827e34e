"""PolaFormer's polarity-aware linear attention: same-signed and opposite-signed channels apart."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.fitting import GridStage, Stage
from latte_convert.kernels.linear import linear_attention, linear_flops

POWERS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Powers that a fit tries: the range that the authors let the model learn."""


class PolaKernel(Kernel):
    r"""Linear attention that keeps the signs of queries and keys (Meng et al., PolaFormer, ICLR 2025).

    A nonnegative feature map loses what negative channels say. PolaFormer splits ``x = x⁺ - x⁻`` into positive
    parts; then ``<q, k>`` is ``<q⁺, k⁺> + <q⁻, k⁻>``, the same-signed channels, minus ``<q⁺, k⁻> + <q⁻, k⁺>``,
    the opposite-signed ones. As a weight cannot be negative, each of the two is an attention of its own, over
    its own half of the value channels, with its own divisor::

        phi(x)    = x ** power                                      elementwise, sharper for a larger power
        same_ij   = <[phi(q_i⁺), phi(q_i⁻)], [phi(k_j⁺), phi(k_j⁻)]>
        opp_ij    = <[phi(q_i⁻), phi(q_i⁺)], [phi(k_j⁺), phi(k_j⁻)]>
        out_i     = [sum_j same_ij·v_j[:half] / sum_j same_ij, sum_j opp_ij·v_j[half:] / sum_j opp_ij]

    Of an odd number of value channels the same-signed half has the larger share; a query gets zeros from a stream
    without keys of its sign. The authors add 1e-6 to the divisors, against the mean over keys; here a divisor is only
    kept from being zero, so that the output does not depend on the size of the queries. The scale of the logits
    cancels where ``power`` is constant in a head.

    ``power``, float32 ``(H, d)``, starts at 3, the middle of the published range: PolaFormer learns it as
    ``1 + alpha·sigmoid(w)`` with ``alpha = 4`` and ``w = 0`` at the start.

    PolaFormer is trained with parts that a pretrained checkpoint does not hold. Its two gates, a linear
    function of each token, become one factor per channel: the ``sigma`` of the extras, whose first half of
    each head gates the same-signed stream and whose second half the opposite-signed one. Its learned scale per channel
    becomes the module's own scaling, and its positional encoding of the keys is the model's. The
    depthwise convolution of the values is left out: the original attention has no equivalent.
    """

    name = "pola"
    causal_form = True
    legend = "power is the mean exponent of the features"

    def __init__(self, heads: int, head_dim: int, **extras: Unpack[Extras]) -> None:
        super().__init__(heads, head_dim, **extras)
        self.power = nn.Parameter(torch.full((heads, head_dim), 3.0, dtype=torch.float32))

    def attend(self, call: AttentionCall) -> Tensor:
        """Both streams, in float32 (float64 for float64 inputs)."""
        exponent = self.power.to(torch.promote_types(call.query.dtype, torch.float32))[:, None]
        positive, negative = _polar(call.query, exponent, call.scale)
        # A factor per query cancels; without it, two float16 maxima to the fifth power overflow in their product.
        size = torch.maximum(positive, negative).amax(-1, keepdim=True).detach()
        size = size.masked_fill(size == 0, 1)
        positive, negative = positive / size, negative / size
        features = torch.cat(_polar(call.key, exponent, call.scale), dim=-1)
        same, opposite = torch.cat([positive, negative], dim=-1), torch.cat([negative, positive], dim=-1)
        halves = call.value.tensor_split(2, dim=-1)
        streams = [
            linear_attention(stream, features, half, mask=call.mask, causal=call.causal)
            for stream, half in zip((same, opposite), halves, strict=True)
        ]
        return torch.cat(streams, dim=-1).to(call.query.dtype)

    def own_stages(self, weight: Tensor | None, seed: int) -> list[Stage]:
        """One power per head."""
        return [GridStage(self, weight, seed, self.power, POWERS)]

    @torch.no_grad()
    def scalars(self) -> dict[str, Tensor]:
        """Mean exponent of each head."""
        return {"power": self.power.mean(-1)}

    def attend_flops(self, shape: CallShape) -> int:
        """Two streams of ``2·d`` features, each with its own divisor and half of the values."""
        half = shape.value_dim // 2
        halves = (shape.value_dim - half, half)
        return sum(linear_flops(replace(shape, value_dim=dim), 2 * shape.head_dim) for dim in halves)


def _polar(tokens: Tensor, exponent: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``phi`` of the positive and of the negative part."""
    # One layout for all callers: how a power is rounded depends on it.
    own = tokens.to(exponent.dtype, copy=True, memory_format=torch.contiguous_format).mul_(scale**0.5)
    strength = own.abs() ** exponent
    positive = strength * (own > 0)
    return positive, strength - positive
