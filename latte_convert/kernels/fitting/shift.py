"""``key_shift``: subtract each head's mean key."""

from __future__ import annotations

import torch
from torch import Tensor

from latte_convert.attention import AttentionCall
from latte_convert.kernels.fitting.stage import Stage


class ShiftStage(Stage):
    """Sets ``shift`` to the mean key of each head over all samples.

    A key that all tokens share adds one number to all logits of a query. Softmax does not see it, while an expansion
    around 0 is only good for small logits: DINOv2's have offsets of 20 to 40 per query.
    """

    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """Sum and number of the visible keys."""
        key = call.key[0].double()
        seen = torch.ones(key.shape[1], device=key.device) if call.mask is None else call.mask[0]
        seen = seen.double()[:, None]
        return (key * seen).sum(1), seen.sum()

    @torch.no_grad()
    def solve(self) -> None:
        """The mean."""
        total, count = self.moments
        assert self.kernel.shift is not None
        self.kernel.shift.copy_(total / count.clamp_min(1))
