"""Softmax attention behind the kernel signature: with it, a rewrite must reproduce the original."""

from __future__ import annotations

from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.softmax import softmax_attention, softmax_flops


class ExactKernel(Kernel):
    """``softmax(scale · q kᵀ) v`` through ``F.scaled_dot_product_attention``, without parameters."""

    name = "exact"
    causal_form = True
    takes_merged = True
    takes_bias = True

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend; see ``Kernel.forward``."""
        return softmax_attention(call)

    def attend_flops(self, shape: CallShape) -> int:
        """Both matmuls."""
        return softmax_flops(shape)

    def paper_flops(self, shape: CallShape) -> int:
        """``Nq·Nk·H·d``: ``N²·D`` in self-attention with equal head sizes."""
        return shape.queries * shape.keys * shape.heads * shape.head_dim
