"""The quadratic Taylor expansion of softmax around a fixed centre, reduced to its diagonal."""

from __future__ import annotations

from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.latte.kernel import latte_attention
from latte_convert.kernels.linear import linear_flops


class QtVitKernel(Kernel):
    """``Sim_ij = <(q'_i + 1)², (k'_j + 1)²> + 1`` with ``x' = sqrt(scale)·x``, the squares elementwise; no parameters.

    ``exp(x) ≈ 1 + x + x²/2 = [(x + 1)² + 1] / 2``, and of the Kronecker square only the products of a channel with
    itself: after Xu et al., "QT-ViT: Improving Linear Attention in ViT with Quadratic Taylor Expansion" (NeurIPS
    2024), in the form of LATTE without tunable anchor, normalisation and fitted scalars. The baseline of equal cost.
    """

    name = "qt_vit"
    causal_form = True
    folds_sigma = True

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend; see ``Kernel.forward``."""
        one = call.query.new_ones(1)
        return latte_attention(
            call,
            alpha=one - 1,
            delta_q=one,
            delta_k=one,
            beta_q=one,
            beta_k=one,
            sigma=self.sigma,
            tte=False,
            jpn=False,
        )

    def attend_flops(self, shape: CallShape) -> int:
        """As LATTE's: ``linear_flops`` with a padding feature, whose plain sum over values is not counted."""
        return linear_flops(shape, shape.head_dim, padding=1)
