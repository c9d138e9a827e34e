"""Fit of one parameter by trying a few values of it, for kernels without a closed form and with a single knob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from latte_convert.attention import AttentionCall
from latte_convert.kernels.fitting.stage import Stage

if TYPE_CHECKING:
    from latte_convert.kernels.base import Kernel

SAMPLES = 8
"""Samples that the values are tried on."""


class GridStage(Stage):
    """Sets a parameter to the value with the least squared error of the attention output, for each head or the layer.

    Where the output is scaled afterwards (``sigma``, ``output_map``), every value is judged at its best scale.

    Args:
        kernel: The kernel.
        weight: See ``Stage``.
        seed: See ``Stage``.
        parameter: ``(H, ...)`` or, one for the layer, ``(1, ...)``; all its entries get the same value.
        values: The values to try.
    """

    def __init__(
        self, kernel: Kernel, weight: Tensor | None, seed: int, parameter: nn.Parameter, values: Sequence[float]
    ) -> None:
        super().__init__(kernel, weight, seed)
        self._parameter = parameter
        self._values = values
        self._scaled = kernel.sigma is not None or kernel.output_map is not None

    @torch.no_grad()
    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """``|Y|²`` and ``<Y, Y*>`` for each value, ``(V, H)``, and ``|Y*|²``, ``(H,)``."""
        if self.samples >= SAMPLES:
            return ()
        rows = self.valid(call)
        wanted = target[:, rows]
        own, cross = [], []
        for value in self._values:
            self._parameter.fill_(value)
            output = self.kernel(call)[0].float()[:, rows]
            own.append(output.square().sum((-2, -1)))
            cross.append((output * wanted).sum((-2, -1)))
        return torch.stack(own).double(), torch.stack(cross).double(), wanted.square().sum((-2, -1)).double()

    @torch.no_grad()
    def solve(self) -> None:
        """The best value."""
        own, cross, total = self.moments
        loss = total - cross.square() / own.clamp_min(1e-30) if self._scaled else total - 2 * cross + own
        if len(self._parameter) == 1:
            loss = loss.sum(-1, keepdim=True)
        best = torch.tensor(self._values, device=loss.device)[loss.argmin(0)]
        shape = (-1, *[1] * (self._parameter.dim() - 1))
        self._parameter.copy_(best.reshape(shape).expand_as(self._parameter))
