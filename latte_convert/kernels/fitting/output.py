"""The last step of every fit: what is put on a kernel's output, in closed form, and the error that remains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latte_convert.attention import AttentionCall
from latte_convert.kernels.fitting.stage import Stage, ridge

if TYPE_CHECKING:
    from latte_convert.kernels.base import Kernel

RIDGE = 0.01
"""Shrinkage of sigma toward 1, relative to the mean curvature. Unregularised, sigma runs to -7 and 8 on
DINOv2-S; on held-out samples of it and of MiniLM a little shrinkage costs nothing."""


class OutputStage(Stage):
    """Sets ``sigma`` and ``bias``, with all other parameters as they are.

    The squared error of the module output, ``|W (sigma ⊙ y + b - y*)|²`` over every token, is quadratic in sigma:
    ``((WᵀW) ∘ YᵀY) sigma = diag-sum((WᵀW) ∘ YᵀY*)``, with a ridge toward 1. A bias centres both ``y`` and ``y*``.
    """

    def __init__(self, kernel: Kernel, weight: Tensor | None, seed: int) -> None:
        super().__init__(kernel, weight, seed)
        self._gram = None if weight is None else weight.double().T @ weight.double()

    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """``YᵀY``, ``YᵀY*``, ``Y*ᵀY*`` over channels, the sums of both, and the number of tokens."""
        rows = self.valid(call)
        with torch.no_grad():
            output = self.kernel(call)[0].float()
        output, wanted = (x[:, rows].transpose(0, 1).flatten(1) for x in (output, target))
        products = (output.T @ output, output.T @ wanted, wanted.T @ wanted)
        sums = (output.sum(0), wanted.sum(0), torch.tensor(float(len(rows))))
        return tuple(x.double() for x in (*products, *sums))

    @torch.no_grad()
    def solve(self) -> None:
        """Sigma, bias and the error."""
        own, cross, total, own_sum, wanted_sum, count = self.moments
        spread = total  # around the mean, where a bias takes care of the mean
        if self.kernel.bias is not None:
            n = count.clamp_min(1)
            own = own - torch.outer(own_sum, own_sum) / n
            cross = cross - torch.outer(own_sum, wanted_sum) / n
            spread = total - torch.outer(wanted_sum, wanted_sum) / n
        gram = torch.eye(len(own), dtype=own.dtype, device=own.device) if self._gram is None else self._gram
        quadratic, linear = gram * own, (gram * cross).sum(-1)
        sigma = torch.ones_like(linear)
        if self.kernel.sigma is not None and self.kernel.output_map is None:  # a map has done more already
            sigma = ridge(quadratic, linear, RIDGE)
            self.kernel.sigma.copy_(sigma)
        if self.kernel.bias is not None:
            self.kernel.bias.copy_((wanted_sum - sigma * own_sum) / count.clamp_min(1))
        error = sigma @ quadratic @ sigma - 2 * linear @ sigma + (gram * spread).sum()
        self.error = float(error.clamp_min(0) / (gram * total).sum().clamp_min(1e-30))


class MapStage(Stage):
    """Sets ``output_map``: least squares per head on the attention output, shrunk toward the identity.

    Each sample belongs to one of ``FOLDS`` folds; the strength is the one whose maps, fitted without a fold, have the
    least error on it. Unregularised, the map overfits badly (DINOv2-S: 0.88 to 0.43).
    """

    FOLDS = 4
    STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e4)

    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """``YᵀY`` and ``YᵀY*`` of each head and ``|Y*|²``, in the sample's fold: ``(FOLDS, H, dv, dv)``."""
        rows = self.valid(call)
        with torch.no_grad():
            output = self.kernel(call)[0].float()[:, rows]
        wanted = target[:, rows]
        place = torch.nn.functional.one_hot(torch.tensor(self.samples % self.FOLDS), self.FOLDS).double()
        own, cross = (output.mT @ output).double(), (output.mT @ wanted).double()
        total = wanted.double().square().sum((-2, -1))
        where = place.to(own.device)
        return tuple(torch.einsum("f,...->f...", where, x) for x in (own, cross, total))

    @torch.no_grad()
    def solve(self) -> None:
        """The maps of all samples with the strength that folds choose, head by head."""
        own, cross, total = self.moments
        used = int((total.sum(-1) > 0).sum())
        assert self.kernel.output_map is not None
        if used < 2:
            return  # nothing to choose the strength with: the identity stays
        errors = torch.zeros(len(self.STRENGTHS), own.shape[1], dtype=own.dtype, device=own.device)
        for i, strength in enumerate(self.STRENGTHS):
            for fold in range(used):
                rest_own, rest_cross = own.sum(0) - own[fold], cross.sum(0) - cross[fold]
                errors[i] += _map_error(_shrunk(rest_own, rest_cross, strength), own[fold], cross[fold], total[fold])
        best = errors.argmin(0).tolist()
        for head, choice in enumerate(best):
            solved = _shrunk(own[:, head].sum(0)[None], cross[:, head].sum(0)[None], self.STRENGTHS[choice])
            self.kernel.output_map[head].copy_(solved[0])


def _shrunk(own: Tensor, cross: Tensor, strength: float) -> Tensor:
    """Minimiser of ``|Y M - Y*|² + r |M - I|²`` for each head, ``r`` relative to the mean of ``YᵀY``'s diagonal."""
    pull = strength * own.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)[:, None, None]
    eye = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
    solution: Tensor = torch.linalg.solve(own + pull * eye, cross + pull * eye)
    return solution


def _map_error(maps: Tensor, own: Tensor, cross: Tensor, total: Tensor) -> Tensor:
    """``|Y M - Y*|²`` of each head from moments."""
    quadratic = (maps * (own @ maps)).sum((-2, -1))
    error: Tensor = quadratic - 2 * (maps * cross).sum((-2, -1)) + total
    return error
