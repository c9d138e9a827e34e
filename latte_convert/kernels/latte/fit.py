"""The search for the scalars of the ``latte`` kernel: two streamed passes over a grid, no gradient descent.

With the anchor shift ``m = sqrt(1 - alpha)`` and the ratio ``r = (delta_q delta_k) / (beta_q beta_k)`` the kernel is

    y(m, r) = v̄ + r U(m) / (1 + r P(m))

where ``v̄`` is the mean of the visible values, ``U`` the mean over visible keys of ``cos_m(q, k) (v - v̄)`` and ``P``
that of ``cos_m(q, k)``. So one evaluation of ``U`` and ``P`` serves every ratio, and the objective, the squared error
of the *module output* ``W (sigma ⊙ y)`` against ``W y*``, needs only second moments of ``y`` and ``y*``:

1. search: a coarse grid of (m, r), each head with its own gain, heads taken one by one (``W_hᵀW_h``);
2. refine: a fine grid around the best, now with the error of all heads together (``granularity: layer``).

The gains stand for the ``sigma`` that ``OutputStage`` finds afterwards. Only moments are kept: memory does not depend
on the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from latte_convert.attention import AttentionCall
from latte_convert.kernels.fitting.output import RIDGE
from latte_convert.kernels.fitting.stage import Stage, ridge

if TYPE_CHECKING:
    from latte_convert.kernels.latte.kernel import LatteKernel

SHIFTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Coarse grid of ``m = sqrt(1 - alpha)``: 1 is the plain Taylor expansion around 0."""
RATIOS = tuple(10.0**e for e in range(-1, 5))
"""Coarse grid of the ratio for normalised features, whose products lie in [0, 1]."""
PLAIN_RATIOS = tuple(10.0**e for e in range(-5, 5))
"""The same for plain squares, whose products have no bound."""
REFINEMENT = (-0.5, -0.25, 0.0, 0.25, 0.5)
"""Steps of the fine grid, in units of the coarse grid's spacing."""
EPS = 1e-6
"""Added to the norms of features, as in the kernel."""


class LatteStage(Stage):
    """Sets ``alpha``, ``delta_q`` and ``delta_k``; the padding scalars stay 1, as only the ratio is determined.

    Args:
        kernel: The kernel.
        weight: See ``Stage``.
        seed: See ``Stage``.
    """

    passes = 2
    kernel: LatteKernel

    def __init__(self, kernel: LatteKernel, weight: Tensor | None, seed: int) -> None:
        super().__init__(kernel, weight, seed)
        self._per_head = len(kernel.alpha) > 1
        self._gains = kernel.sigma is not None or kernel.output_map is not None
        shifts = SHIFTS if kernel.tte else (1.0,)
        ratios = RATIOS if kernel.jpn else PLAIN_RATIOS
        # (points, groups): a group is a head or the whole layer; all start with the same grid.
        grid = torch.cartesian_prod(torch.tensor(shifts), torch.tensor(ratios))
        self._shifts = grid[:, :1].expand(-1, len(kernel.alpha))
        self._ratios = grid[:, 1:].expand(-1, len(kernel.alpha))
        self._refining = False

    def moments_of(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        """Second moments of the output at every point of the grid and of the target, on some rows."""
        return self._refine_moments(call, target) if self._refining else self._search_moments(call, target)

    def solve(self) -> None:
        """The best point, or the fine grid around it."""
        if self._refining:
            self._end_refine()
        else:
            self._end_search()
            self._refining = True

    def _search_moments(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        rows = self.rows(call)
        target = target[:, rows]
        gram = self._head_gram(target)
        projected = target @ gram
        own, cross = [], []
        for output in self._outputs(call, rows):
            own.append(((output @ gram) * output).sum((-2, -1)))
            cross.append((output * projected).sum((-2, -1)))
        total = (projected * target).sum((-2, -1))
        return torch.stack(own).double(), torch.stack(cross).double(), total.double()

    def _end_search(self) -> None:
        own, cross, total = self.moments  # (C, H), (C, H), (H,)
        loss = total - cross.square() / own.clamp_min(1e-30) if self._gains else total - 2 * cross + own
        if not self._per_head:
            loss = loss.sum(-1, keepdim=True)
        best = loss.argmin(0)
        shift = self._shifts.gather(0, best[None].cpu())[0]
        ratio = self._ratios.gather(0, best[None].cpu())[0]
        shifts = torch.stack([_between(SHIFTS, shift, step) for step in REFINEMENT])
        if not self.kernel.tte:
            shifts = shift[None]
        ratios = torch.stack([ratio * 10**step for step in REFINEMENT])
        pairs = [(s, r) for s in shifts for r in ratios]
        self._shifts = torch.stack([s for s, _ in pairs])
        self._ratios = torch.stack([r for _, r in pairs])

    def _refine_moments(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        rows = self.rows(call)
        target = target[:, rows]
        wanted = self._project(target)
        everything = wanted.sum(0).flatten()
        total = wanted.flatten(1).square().sum(1) if self._per_head else everything.square().sum()
        own, cross = [], []
        for output in self._outputs(call, rows):
            z = self._project(output)
            own.append(z.flatten(1) @ z.flatten(1).T)  # (H, H)
            cross.append((z * wanted).flatten(1).sum(1) if self._per_head else z.flatten(1) @ everything)
        return torch.stack(own).double(), torch.stack(cross).double(), total.double()

    def _end_refine(self) -> None:
        own, cross, total = self.moments
        if self._per_head:
            own = own.diagonal(dim1=-2, dim2=-1)
            loss = total - cross.square() / own.clamp_min(1e-30) if self._gains else total - 2 * cross + own
        else:
            gains = torch.ones_like(cross)
            if self._gains:
                gains = torch.stack([ridge(a, b, RIDGE) for a, b in zip(own, cross, strict=True)])
            quadratic = torch.einsum("ch,chi,ci->c", gains, own, gains)
            loss = (total - 2 * (cross * gains).sum(-1) + quadratic)[:, None]
        best = loss.argmin(0)[None].cpu()
        shift, ratio = self._shifts.gather(0, best)[0], self._ratios.gather(0, best)[0]
        with torch.no_grad():
            if self.kernel.tte:
                self.kernel.alpha.copy_(1 - shift.square())
            self.kernel.delta_q.copy_(ratio.sqrt())
            self.kernel.delta_k.copy_(ratio.sqrt())

    def _outputs(self, call: AttentionCall, rows: Tensor) -> Iterator[Tensor]:
        """The kernel's output ``(H, n, dv)`` on some rows at each point of the grid; equal shifts share their terms."""
        last: Tensor | None = None
        for shift, ratio in zip(self._shifts, self._ratios, strict=True):
            if last is None or not torch.equal(shift, last):
                mean, part, share = self._terms(call, shift, rows)
                last = shift
            r = ratio.to(part.device).reshape(-1, 1, 1)
            yield mean + r * part / (1 + r * share)

    def _terms(self, call: AttentionCall, shift: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``v̄``, ``U`` and ``P`` of the module docstring for some query rows: ``(H, n or 1, dv | dv | 1)``."""
        shift = shift.to(call.query.device).reshape(-1, 1, 1)
        query, key = (tokens[0] for tokens in self.kernel.reframe(call.query[:, :, rows].float(), call.key.float()))
        value = call.value[0].float()
        psi_q = (call.scale**0.5 * query + shift).square()
        psi_k = (call.scale**0.5 * key + shift).square()
        size_k = torch.ones(1, device=key.device)
        if self.kernel.jpn:
            psi_q = psi_q / (psi_q.norm(dim=-1, keepdim=True) + EPS)
            size_k = psi_k.norm(dim=-1, keepdim=True) + EPS
        seen = torch.ones(key.shape[1], device=key.device) if call.mask is None else call.mask[0].float()
        if call.causal:
            limit = rows + (key.shape[1] - call.query.shape[2])
            visible = seen * (torch.arange(key.shape[1], device=key.device) <= limit[:, None])
            count = visible.sum(-1, keepdim=True).clamp_min(1)
            similarity = psi_q @ (psi_k / size_k).mT * visible / count
            mean = (visible / count) @ value
            share = similarity.sum(-1, keepdim=True)
            return mean, similarity @ value - share * mean, share
        seen = (seen / seen.sum().clamp_min(1))[:, None]
        mean = (seen * value).sum(-2, keepdim=True)
        weight = seen / size_k
        state = psi_k.mT @ ((value - mean) * weight)
        return mean, psi_q @ state, psi_q @ (psi_k.mT @ weight)

    def _head_gram(self, like: Tensor) -> Tensor:
        """``W_hᵀW_h``, ``(H, dv, dv)``."""
        heads, _, width = like.shape
        if self.weight is None:
            return torch.eye(width, device=like.device).expand(heads, -1, -1)
        blocks = self.weight.reshape(-1, heads, width).transpose(0, 1)
        return blocks.mT @ blocks

    def _project(self, output: Tensor) -> Tensor:
        """Each head's share of the module output, ``(H, n, D)``."""
        if self.weight is None:
            heads, rows, width = output.shape
            placed = output.new_zeros(heads, rows, heads, width)
            placed[torch.arange(heads), :, torch.arange(heads)] = output
            return placed.flatten(2)
        blocks = self.weight.reshape(-1, output.shape[0], output.shape[2]).permute(1, 2, 0)
        return output @ blocks


def _between(grid: tuple[float, ...], value: Tensor, step: float) -> Tensor:
    """The point ``step`` grid spacings away from each value of a sorted grid, inside its range."""
    points = torch.tensor(grid)
    position = torch.searchsorted(points, value.contiguous()) + step
    position = position.clamp(0, len(grid) - 1)
    low = position.floor().long()
    high = position.ceil().long()
    return points[low] + (position - low) * (points[high] - points[low])
