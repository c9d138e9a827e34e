"""Linear attention with feature maps that calibration fits to a layer's own softmax, head by head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.base import Extras, Kernel, check_whole
from latte_convert.kernels.linear import linear_attention, linear_flops, no_autocast


class FittedKernel(Kernel):
    """``Sim_ij = <phi_q(q_i), phi_k(k_j)>`` with ``phi(x) = softmax([y, -y])``, ``y = sqrt(scale)·x W + b``.

    The map of Zhang et al., "The Hedgehog & the Porcupine" (ICLR 2024), with one for queries and one for keys. They
    start as the identity; gradient descent fits them.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        features: Columns of ``W``, f; a token has twice as many features. ``head_dim`` by default.
        **extras: See ``Extras``.

    Attributes:
        query_weight: ``(H, d, f)``, and ``key_weight``.
        query_bias: ``(H, 1, f)``, and ``key_bias``.
    """

    name = "fitted"
    causal_form = True
    recommended: ClassVar[Extras] = {"exact_prefix": True, "key_shift": True, "output_map": True}

    def __init__(self, heads: int, head_dim: int, *, features: int | None = None, **extras: Unpack[Extras]) -> None:
        super().__init__(heads, head_dim, **extras)
        features = head_dim if features is None else features
        check_whole("fitted", {"features": (features, 1, 1 << 14)})
        self.options |= {"features": features}
        self.features = features
        eye = torch.eye(head_dim, features).repeat(heads, 1, 1)
        self.query_weight, self.key_weight = nn.Parameter(eye.clone()), nn.Parameter(eye.clone())
        self.query_bias = nn.Parameter(torch.zeros(heads, 1, features))
        self.key_bias = nn.Parameter(torch.zeros(heads, 1, features))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend; see ``Kernel.forward``."""
        query, key, root = call.query, call.key, call.scale**0.5
        wide = torch.promote_types(query.dtype, torch.float32)
        with no_autocast(query.device.type):
            q = _features(query.to(wide), self.query_weight.to(wide) * root, self.query_bias.to(wide))
            k = _features(key.to(wide), self.key_weight.to(wide) * root, self.key_bias.to(wide))
            return linear_attention(q, k, call.value, mask=call.mask, causal=call.causal).to(query.dtype)

    def descended(self) -> list[nn.Parameter]:
        """The maps."""
        return [*super().descended(), self.query_weight, self.query_bias, self.key_weight, self.key_bias]

    def attend_flops(self, shape: CallShape) -> int:
        """The two maps, then ``linear_flops``."""
        maps = 2 * (shape.queries + shape.keys) * shape.heads * shape.head_dim * self.features
        return maps + linear_flops(shape, 2 * self.features)


def _features(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``softmax([y, -y])`` of the tokens, ``(B, H, N, 2f)``: positive, and bounded whatever the input."""
    y = tokens @ weight + bias
    return torch.cat([y, -y], dim=-1).softmax(-1)
