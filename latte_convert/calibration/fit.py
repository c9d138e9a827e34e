"""The layer-local fit of the ``latte`` kernel: three streamed passes, closed forms, no gradient descent.

With the anchor shift ``m = sqrt(1 - alpha)`` and the ratio ``r = (delta_q delta_k) / (beta_q beta_k)`` the kernel is

    y(m, r) = v̄ + r U(m) / (1 + r P(m))

where ``v̄`` is the mean of the visible values, ``U`` the mean over visible keys of ``cos_m(q, k) (v - v̄)`` and ``P``
that of ``cos_m(q, k)``. So one evaluation of ``U`` and ``P`` serves every ratio, and the objective, the squared error
of the *module output* ``W (sigma ⊙ y)`` against ``W y*``, needs only second moments of ``y`` and ``y*``:

1. search: a coarse grid of (m, r), each head with its own gain, heads taken one by one (``W_hᵀW_h``);
2. refine: a fine grid around the best, now with the error of all heads together (``granularity: layer``);
3. scale: ``sigma`` in closed form, ``((WᵀW) ∘ YᵀY) sigma = diag-sum((WᵀW) ∘ YᵀY*)``, over every token.

Only these moments are kept: memory does not depend on the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from latte_convert.adapters.base import AttentionCall, AttentionSite
from latte_convert.kernels.latte import LatteKernel
from latte_convert.recipe import Recipe

SHIFTS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Coarse grid of ``m = sqrt(1 - alpha)``: 1 is the plain Taylor expansion around 0."""
RATIOS = tuple(10.0**e for e in range(-1, 5))
"""Coarse grid of the ratio for normalised features, whose products lie in [0, 1]."""
PLAIN_RATIOS = tuple(10.0**e for e in range(-5, 5))
"""The same for plain squares, whose products have no bound."""
REFINEMENT = (-0.5, -0.25, 0.0, 0.25, 0.5)
"""Steps of the fine grid, in units of the coarse grid's spacing."""
ROWS = 128
"""Queries of a sample that the grids are evaluated on; the closed form for sigma sees all of them."""
EPS = 1e-6
"""Added to the norms of features, as in the kernel."""
RIDGE = 0.01
"""Shrinkage of sigma toward 1, relative to the mean curvature. Unregularised, sigma runs to -7 and 8 on
DINOv2-S; on held-out samples of it and of MiniLM a little shrinkage costs nothing."""


@dataclass(frozen=True)
class Fit:
    """What calibration found for one site.

    Attributes:
        kernel: The kernel with its fitted parameters, or None where the site cannot be converted.
        error: Relative squared error of the module output on the calibration samples.
        reason: Why there is no kernel, or None.
    """

    kernel: LatteKernel | None
    error: float | None = None
    reason: str | None = None


class LatteFit:
    """Streaming fit of one site; call ``observe`` for each sample of a pass, then ``end_pass``.

    Args:
        site: The site.
        recipe: Granularity and switches.
        projection: The layer that reads the attention output; without it the error is that of its input.
    """

    def __init__(self, site: AttentionSite, recipe: Recipe, projection: nn.Linear | None) -> None:
        self.site = site
        self.recipe = recipe
        self.passes = 3 if recipe.sigma else 2
        self.failure: str | None = None
        self._weight = None if projection is None else projection.weight.detach().float()
        self._stage = 0
        self._samples = 0
        self._moments: tuple[Tensor, ...] = ()
        shifts = SHIFTS if recipe.tte else (1.0,)
        ratios = RATIOS if recipe.jpn else PLAIN_RATIOS
        # (candidates, groups): a group is a head or the whole layer; all start with the same candidates.
        groups = site.heads if recipe.granularity == "head" else 1
        grid = torch.cartesian_prod(torch.tensor(shifts), torch.tensor(ratios))
        self._shifts = grid[:, :1].expand(-1, groups)
        self._ratios = grid[:, 1:].expand(-1, groups)
        self._best: tuple[Tensor, Tensor] | None = None
        self._sigma: Tensor | None = None
        self._error: float | None = None

    def observe(self, call: AttentionCall, target: Tensor) -> None:
        """Add one sample.

        Args:
            call: The call of the original model.
            target: Its exact attention output ``(B, H, Nq, dv)``.
        """
        observe = (self._observe_search, self._observe_refine, self._observe_scale)[self._stage]
        for i in range(len(target)):
            if self.failure is not None:
                return
            one = call.sample(i)
            moments = observe(one, target[i].float())
            self._moments = (
                tuple(a + b for a, b in zip(self._moments, moments, strict=True)) if self._moments else moments
            )
            self._samples += 1

    def end_pass(self) -> None:
        """Turn the moments of a pass into parameters."""
        if self.failure is None and not all(bool(m.isfinite().all()) for m in self._moments):
            self.failure = "its attention is not finite on the calibration samples"
        if self.failure is None:
            (self._end_search, self._end_refine, self._end_scale)[self._stage]()
        self._stage += 1
        self._samples = 0
        self._moments = ()

    def result(self) -> Fit:
        """The fitted kernel, after the last pass."""
        if self.failure is not None or self._best is None:
            return Fit(None, reason=self.failure or "no calibration sample reached it")
        recipe, (shift, ratio) = self.recipe, self._best
        kernel = LatteKernel(
            self.site.heads,
            self.site.head_dim,
            granularity=recipe.granularity,
            sigma=recipe.sigma,
            tte=recipe.tte,
            jpn=recipe.jpn,
        )
        with torch.no_grad():
            kernel.alpha.copy_(1 - shift.square() if recipe.tte else torch.zeros_like(shift))
            # Only the ratio is determined; split it evenly between query and key, and leave the padding at 1.
            kernel.delta_q.copy_(ratio.sqrt())
            kernel.delta_k.copy_(ratio.sqrt())
            if kernel.sigma is not None and self._sigma is not None:
                kernel.sigma.copy_(self._sigma)
        return Fit(kernel, error=self._error)

    # --- the three passes -----------------------------------------------------------------------------------

    def _observe_search(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        rows = self._rows(call)
        target = target[:, rows]
        gram = self._head_gram(target)
        projected = target @ gram
        own, cross = [], []
        for output in self._candidates(call, rows):
            own.append(((output @ gram) * output).sum((-2, -1)))
            cross.append((output * projected).sum((-2, -1)))
        total = (projected * target).sum((-2, -1))
        return torch.stack(own).double(), torch.stack(cross).double(), total.double()

    def _end_search(self) -> None:
        own, cross, total = self._moments  # (C, H), (C, H), (H,)
        loss = total - cross.square() / own.clamp_min(1e-30) if self.recipe.sigma else total - 2 * cross + own
        if self.recipe.granularity == "layer":
            loss = loss.sum(-1, keepdim=True)
        best = loss.argmin(0)
        shift = self._shifts.gather(0, best[None].cpu())[0]
        ratio = self._ratios.gather(0, best[None].cpu())[0]
        shifts = torch.stack([_between(SHIFTS, shift, step) for step in REFINEMENT])
        if not self.recipe.tte:
            shifts = shift[None]
        ratios = torch.stack([ratio * 10**step for step in REFINEMENT])
        pairs = [(s, r) for s in shifts for r in ratios]
        self._shifts = torch.stack([s for s, _ in pairs])
        self._ratios = torch.stack([r for _, r in pairs])

    def _observe_refine(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        rows = self._rows(call)
        target = target[:, rows]
        wanted = self._project(target)
        per_head = self.recipe.granularity == "head"
        everything = wanted.sum(0).flatten()
        total = wanted.flatten(1).square().sum(1) if per_head else everything.square().sum()
        own, cross = [], []
        for output in self._candidates(call, rows):
            z = self._project(output)
            own.append(z.flatten(1) @ z.flatten(1).T)  # (H, H)
            cross.append((z * wanted).flatten(1).sum(1) if per_head else z.flatten(1) @ everything)
        return torch.stack(own).double(), torch.stack(cross).double(), total.double()

    def _end_refine(self) -> None:
        own, cross, total = self._moments
        if self.recipe.granularity == "head":
            own = own.diagonal(dim1=-2, dim2=-1)
            loss = total - cross.square() / own.clamp_min(1e-30) if self.recipe.sigma else total - 2 * cross + own
        else:
            gains = torch.ones_like(cross)
            if self.recipe.sigma:
                gains = torch.stack([_ridge(a, b) for a, b in zip(own, cross, strict=True)])
            quadratic = torch.einsum("ch,chi,ci->c", gains, own, gains)
            loss = (total - 2 * (cross * gains).sum(-1) + quadratic)[:, None]
        best = loss.argmin(0)[None].cpu()
        self._best = self._shifts.gather(0, best)[0], self._ratios.gather(0, best)[0]
        if not self.recipe.sigma:
            self._error = float(loss.min(0).values.sum() / total.sum().clamp_min(1e-30))

    def _observe_scale(self, call: AttentionCall, target: Tensor) -> tuple[Tensor, ...]:
        shift, ratio = (x.to(target.device) for x in self._best or ())
        rows = self._valid(call)
        target = target[:, rows]
        mean, part, share = self._terms(call, shift, rows)
        r = ratio.reshape(-1, 1, 1)
        output = (mean + r * part / (1 + r * share)).transpose(0, 1).flatten(1)
        target = target.transpose(0, 1).flatten(1)
        return (output.T @ output).double(), (output.T @ target).double(), (target.T @ target).double()

    def _end_scale(self) -> None:
        own, cross, total = self._moments
        weight = self._weight
        gram = torch.eye(len(own), dtype=own.dtype, device=own.device) if weight is None else None
        if gram is None and weight is not None:
            gram = weight.double().T @ weight.double()
        assert gram is not None
        quadratic, linear = gram * own, (gram * cross).sum(-1)
        sigma = _ridge(quadratic, linear)
        error = sigma @ quadratic @ sigma - 2 * linear @ sigma + (gram * total).sum()
        self._sigma = sigma.float().cpu()
        self._error = float(error / (gram * total).sum().clamp_min(1e-30))

    # --- pieces ---------------------------------------------------------------------------------------------

    def _rows(self, call: AttentionCall) -> Tensor:
        """A seeded choice of query positions, different for each sample."""
        valid = self._valid(call)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self._samples)
        chosen = torch.randperm(len(valid), generator=generator)[:ROWS].sort().values
        return valid[chosen.to(valid.device)]

    def _valid(self, call: AttentionCall) -> Tensor:
        """Positions of the queries that count: in self-attention, a masked key is a padded query as well."""
        if call.mask is not None and self.site.kind == "self" and call.query.shape[2] == call.key.shape[2]:
            return call.mask[0].nonzero()[:, 0]
        return torch.arange(call.query.shape[2], device=call.query.device)

    def _candidates(self, call: AttentionCall, rows: Tensor) -> Iterator[Tensor]:
        """The kernel's output ``(H, n, dv)`` on some rows for each candidate; equal shifts share their terms."""
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
        key, value = call.key[0].float(), call.value[0].float()
        query = call.query[0, :, rows].float()
        psi_q = (call.scale**0.5 * query + shift).square()
        psi_k = (call.scale**0.5 * key + shift).square()
        size_k = torch.ones(1, device=key.device)
        if self.recipe.jpn:
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
        if self._weight is None:
            return torch.eye(width, device=like.device).expand(heads, -1, -1)
        blocks = self._weight.reshape(-1, heads, width).transpose(0, 1)
        return blocks.mT @ blocks

    def _project(self, output: Tensor) -> Tensor:
        """Each head's share of the module output, ``(H, n, D)``."""
        if self._weight is None:
            heads, rows, width = output.shape
            placed = output.new_zeros(heads, rows, heads, width)
            placed[torch.arange(heads), :, torch.arange(heads)] = output
            return placed.flatten(2)
        blocks = self._weight.reshape(-1, output.shape[0], output.shape[2]).permute(1, 2, 0)
        return output @ blocks


def _between(grid: tuple[float, ...], value: Tensor, step: float) -> Tensor:
    """The point ``step`` grid spacings away from each value of a sorted grid, inside its range."""
    points = torch.tensor(grid)
    position = torch.searchsorted(points, value.contiguous()) + step
    position = position.clamp(0, len(grid) - 1)
    low = position.floor().long()
    high = position.ceil().long()
    return points[low] + (position - low) * (points[high] - points[low])


def _ridge(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Minimiser of ``xᵀQx - 2 lᵀx + ridge |x - 1|²``: least squares, shrunk toward 1."""
    ridge = RIDGE * quadratic.diagonal().mean().clamp_min(1e-30)
    eye = torch.eye(len(linear), dtype=linear.dtype, device=linear.device)
    solution: Tensor = torch.linalg.solve(quadratic + ridge * eye, linear + ridge)
    return solution
