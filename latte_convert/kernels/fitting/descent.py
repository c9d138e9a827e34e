"""Fit by gradient descent, for parameters without a closed form: layer by layer, on a bounded choice of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from latte_convert.attention import AttentionCall
from latte_convert.kernels.fitting.stage import Stage
from latte_convert.kernels.softmax import softmax_attention

if TYPE_CHECKING:
    from latte_convert.kernels.base import Kernel

SAMPLES = 8
"""Samples that are kept; what a fit costs in memory does not depend on how many there are."""
TOKENS = 512
"""Keys of a sample, a seeded choice: a weight depends on its pair of tokens alone, so a part teaches the same map."""
STEPS = 200
"""Gradient steps."""
RATE = 0.03
"""Learning rate of Adam at the start; it falls to 0 along a cosine."""


class DescentStage(Stage):
    """Fits parameters of a kernel to the softmax over the same keys.

    The objective is the relative squared error of the module output, ``|W (y - y*)|² / |W y*|²``. Deterministic for a
    seed: one sample a step, in turn.

    Args:
        kernel: The kernel.
        weight: See ``Stage``.
        seed: See ``Stage``.
        parameters: The parameters to fit.
    """

    def __init__(self, kernel: Kernel, weight: Tensor | None, seed: int, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(kernel, weight, seed)
        self._parameters = parameters
        self._kept: list[AttentionCall] = []

    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """Keep a part of the tokens of the first samples, ``(1, H, n, d)`` each."""
        if len(self._kept) >= SAMPLES:
            return ()
        rows, keys = self._choose(self.valid(call)), self._choose(_visible(call))
        if call.causal:  # neighbours stay neighbours, and queries stay aligned with keys
            rows = keys = keys.new_tensor(range(min(TOKENS, call.key.shape[2], call.query.shape[2])))
        parts = (call.query[:, :, rows], call.key[:, :, keys], call.value[:, :, keys])
        query, key, value = (part.detach().float().clone() for part in parts)
        bias = call.bias
        if bias is not None:
            whole = bias.detach().float().expand(-1, -1, call.query.shape[2], call.key.shape[2])
            bias = whole[:, :, rows][..., keys]
        self._kept.append(AttentionCall(query, key, value, call.scale, causal=call.causal, bias=bias))
        return (torch.stack([query.abs().max(), key.abs().max(), value.abs().max()]),)

    def solve(self) -> None:
        """Descend."""
        kept, self._kept = self._kept, []
        with torch.no_grad():
            targets = [softmax_attention(call) for call in kept]
        optimizer = torch.optim.Adam(self._parameters, lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        with torch.enable_grad():
            for step in range(STEPS):
                target = targets[step % len(kept)]
                loss = self._size(self.kernel(kept[step % len(kept)]) - target) / self._size(target).clamp_min(1e-30)
                gradients = torch.autograd.grad(loss, list(self._parameters))
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                schedule.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _choose(self, positions: Tensor) -> Tensor:
        """A seeded choice of at most ``TOKENS`` positions, in order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.samples)
        chosen = torch.randperm(len(positions), generator=generator)[:TOKENS].sort().values
        return positions[chosen.to(positions.device)]

    def _size(self, output: Tensor) -> Tensor:
        """Sum of squares of the module output."""
        merged = output.transpose(1, 2).flatten(2)
        return (merged if self.weight is None else merged @ self.weight.T).square().sum()


def _visible(call: AttentionCall) -> Tensor:
    """Positions of the keys that take part."""
    if call.mask is not None:
        return call.mask[0].nonzero()[:, 0]
    return torch.arange(call.key.shape[2], device=call.key.device)
