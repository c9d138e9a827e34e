"""Softmax attention behind the kernel signature: with it, a rewrite must reproduce the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from latte_convert.attention import CallShape
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.softmax import softmax_attention, softmax_flops

if TYPE_CHECKING:
    from latte_convert.attention import TokenLayout


class ExactKernel(Kernel):
    """``softmax(scale · q kᵀ) v`` through ``F.scaled_dot_product_attention``, without parameters."""

    name = "exact"
    causal_form = True

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        causal: bool,
        layout: TokenLayout | None,
    ) -> Tensor:
        """Attend; see ``Kernel.forward``."""
        return softmax_attention(query, key, value, scale=scale, mask=mask, causal=causal)

    def attend_flops(self, shape: CallShape) -> int:
        """Both matmuls."""
        return softmax_flops(shape)
