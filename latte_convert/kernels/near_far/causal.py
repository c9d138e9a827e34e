"""near_past: near_far where a query sees only the past."""

from __future__ import annotations

from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.near_far.kernel import NearFarKernel, near_far_attention
from latte_convert.kernels.near_far.past import Past, past_products
from latte_convert.kernels.softmax import softmax_attention, softmax_flops


class NearPastKernel(NearFarKernel):
    """``near_far``, which serves causal sites as well, in the form that ``past`` describes.

    There a window is one of a sequence, the window before it takes the place of the halo, all blocks that a query sees
    share ``clusters`` evenly, and ``views`` has no effect. Fewer queries than keys are generation with a cache: they
    attend by softmax. It is a kernel of its own so that by default causal sites, short ones mostly, stay exact.
    """

    name = "near_past"
    causal_form = True
    takes_bias = False

    def attend(self, call: AttentionCall) -> Tensor:
        """``near_far_attention``, or softmax where that is no dearer, and for generation."""
        if not call.causal:
            return super().attend(call)
        if self.is_softmax(call.shape):
            return softmax_attention(call)
        return near_far_attention(
            call.query,
            call.key,
            call.value,
            scale=call.scale,
            window=self.window,
            clusters=self._most(call.shape.keys),
            steps=self.steps,
            mask=call.mask,
            causal=True,
        )

    def _flops(self, shape: CallShape) -> int:
        if not shape.causal:
            return super()._flops(shape)
        if shape.queries != shape.keys:
            return softmax_flops(shape)
        past = Past.of(self.window, self._most(shape.keys), self.steps)
        return 2 * shape.heads * past_products(shape.keys, past, head_dim=shape.head_dim, value_dim=shape.value_dim)
