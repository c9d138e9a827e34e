"""EfficientViT's ReLU linear attention."""

from __future__ import annotations

from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.linear import linear_attention, linear_flops


class ReluKernel(Kernel):
    """``Sim_ij = <relu(q_i), relu(k_j)>``, the divisor plus ``EPS``; without parameters.

    Cai et al., "EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense Prediction" (ICCV 2023), eq. 2,
    ``EPS`` as in the authors' code. The scaling of softmax logits would cancel in the division: it is left out there
    too. A query without a positive channel gets zeros.
    """

    name = "relu"
    causal_form = True
    EPS = 1e-15

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend; see ``Kernel.forward``. The scale is not read."""
        features = (call.query.relu(), call.key.relu())
        out = linear_attention(*features, call.value, mask=call.mask, causal=call.causal, eps=self.EPS)
        return out.to(call.query.dtype)

    def attend_flops(self, shape: CallShape) -> int:
        """See ``linear_flops``."""
        return linear_flops(shape, shape.head_dim)
