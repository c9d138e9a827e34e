"""What a step of a fit has: a kernel to fill in, samples to watch, running moments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latte_convert.attention import AttentionCall

if TYPE_CHECKING:
    from latte_convert.kernels.base import Kernel

ROWS = 128
"""Queries of a sample that a search over a grid is evaluated on; closed forms see all of them."""


class Stage(ABC):
    """Fits some parameters of a kernel in a fixed number of passes over the samples.

    Attributes:
        passes: Passes over the samples.
        error: Relative squared error of the output on the samples, where the stage knows it.

    Args:
        kernel: The kernel; its parameters are set in place.
        weight: Weight of the layer that reads the attention output, ``(D, H·dv)`` float32; None where it is unknown:
            then all channels count alike.
        seed: Seed of the choice of tokens.
    """

    passes = 1

    def __init__(self, kernel: Kernel, weight: Tensor | None, seed: int) -> None:
        self.kernel = kernel
        self.weight = weight
        self.seed = seed
        self.error: float | None = None
        self.samples = 0
        self.moments: tuple[Tensor, ...] = ()

    def observe(self, call: AttentionCall, target: Tensor) -> None:
        """Add one sample.

        Args:
            call: The call of the original model, a batch of one.
            target: Its exact attention output ``(H, Nq, dv)``, float32.
        """
        moments = self.moments_of(call, target)
        if moments:
            self.moments = tuple(a + b for a, b in zip(self.moments, moments, strict=True)) if self.moments else moments
        self.samples += 1

    def end_pass(self) -> bool:
        """Turn the moments of a pass into parameters; returns whether they were finite."""
        finite = all(bool(m.isfinite().all()) for m in self.moments)
        if finite:
            self.solve()
        self.moments = ()
        self.samples = 0
        return finite

    @abstractmethod
    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """Moments of one sample, to be added up; arguments as in ``observe``."""

    @abstractmethod
    def solve(self) -> None:
        """Set parameters from ``self.moments``."""

    def valid(self, call: AttentionCall) -> Tensor:
        """Positions of the queries that the fit is for, ``(n,)``.

        In self-attention a masked key is a padded query as well; exact queries add no error.
        """
        queries = call.query.shape[2]
        first = self.kernel.exact_rows(call.shape)
        if call.mask is not None and call.layout.aligned and queries == call.key.shape[2]:
            rows = call.mask[0].nonzero()[:, 0]
            return rows[rows >= first]
        return torch.arange(first, queries, device=call.query.device)

    def rows(self, call: AttentionCall) -> Tensor:
        """A seeded choice of ``ROWS`` valid positions, different for each sample."""
        valid = self.valid(call)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.samples)
        chosen = torch.randperm(len(valid), generator=generator)[:ROWS].sort().values
        return valid[chosen.to(valid.device)]


def ridge(quadratic: Tensor, linear: Tensor, strength: float) -> Tensor:
    """Minimiser of ``xᵀQx - 2 lᵀx + r |x - 1|²``, with ``r`` relative to the mean diagonal of Q."""
    pull = strength * quadratic.diagonal().mean().clamp_min(1e-30)
    eye = torch.eye(len(linear), dtype=linear.dtype, device=linear.device)
    solution: Tensor = torch.linalg.solve(quadratic + pull * eye, linear + pull)
    return solution
