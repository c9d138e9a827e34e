"""The layer-local fit of a site: its kernel, and the stages that fill it in one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from latte_convert.attention import AttentionCall, AttentionSite
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.fitting.descent import DescentStage
from latte_convert.kernels.fitting.grid import GridStage
from latte_convert.kernels.fitting.output import MapStage, OutputStage
from latte_convert.kernels.fitting.shift import ShiftStage
from latte_convert.kernels.fitting.stage import Stage
from latte_convert.kernels.latte.fit import LatteStage
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.kernels.rivals.fitted import FittedKernel
from latte_convert.kernels.rivals.pola import PolaKernel
from latte_convert.kernels.rivals.taylor2 import Taylor2Kernel
from latte_convert.recipe import Candidate

ALPHAS = (1.0, 0.75, 0.0, -1.0, -3.0, -8.0, -15.0)
"""Anchors of taylor2 that are tried."""
POWERS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Powers of pola that are tried: the range that its authors let it learn."""


@dataclass(frozen=True)
class Fit:
    """What calibration found for one site and one kernel.

    Attributes:
        kernel: The kernel with its fitted parameters, or None where the site cannot be converted.
        error: Relative squared error of the module output on the calibration samples.
        reason: Why there is no kernel, or None.
    """

    kernel: Kernel | None
    error: float | None = None
    reason: str | None = None


class SiteFit:
    """Streaming fit of one kernel to one site; call ``observe`` for each sample of a pass, then ``end_pass``.

    Args:
        site: The site.
        candidate: The kernel and its options.
        projection: The layer that reads the attention output; without it the error is that of its input.
        seed: Seed of the choice of tokens.
    """

    def __init__(self, site: AttentionSite, candidate: Candidate, projection: nn.Module | None, seed: int = 0) -> None:
        self.site = site
        self.kernel = get_kernel(candidate.kernel)(site.heads, site.head_dim, **candidate.options)
        self.failure = obstacle(type(self.kernel), site)
        weight: Any = None if projection is None else projection.weight
        self.stages = _stages(self.kernel, None if weight is None else weight.detach().float(), seed)
        self.passes = sum(stage.passes for stage in self.stages)
        self._left = [stage for stage in self.stages for _ in range(stage.passes)]

    def observe(self, call: AttentionCall, target: Tensor) -> None:
        """Add one sample.

        Args:
            call: The call of the original model.
            target: Its exact attention output ``(B, H, Nq, dv)``.
        """
        for i in range(len(target)):
            if self.failure is not None or not self._left:
                return
            self._left[0].observe(call.sample(i), target[i].float())

    def end_pass(self) -> None:
        """Let the stage turn what it saw into parameters."""
        if self.failure is not None or not self._left:
            return
        stage = self._left.pop(0)
        if not stage.samples:
            self.failure = "no calibration sample reached it"
        elif not stage.end_pass():
            self.failure = "its attention is not finite on the calibration samples"

    def result(self) -> Fit:
        """The fitted kernel, after the last pass."""
        if self.failure is not None:
            return Fit(None, reason=self.failure)
        return Fit(self.kernel, error=self.stages[-1].error)


def obstacle(kernel: type[Kernel], site: AttentionSite) -> str | None:
    """Why a kernel cannot serve a site, or None."""
    if site.causal and not kernel.causal_form:
        return f"kernel '{kernel.name}' has no causal form"
    if site.kind == "cross" and not kernel.cross_form:
        return f"kernel '{kernel.name}' has no form for cross-attention"
    return None


def _stages(kernel: Kernel, weight: Tensor | None, seed: int) -> list[Stage]:
    """What there is to fit, in the order in which one depends on the other."""
    stages: list[Stage] = []
    if kernel.shift is not None:
        stages.append(ShiftStage(kernel, weight, seed))
    if isinstance(kernel, LatteKernel):
        stages.append(LatteStage(kernel, weight, seed))
    if isinstance(kernel, Taylor2Kernel):
        stages.append(GridStage(kernel, weight, seed, kernel.alpha, ALPHAS))
    if isinstance(kernel, PolaKernel):
        stages.append(GridStage(kernel, weight, seed, kernel.power, POWERS))
    if descended := _without_closed_form(kernel):
        stages.append(DescentStage(kernel, weight, seed, descended))
    if kernel.output_map is not None:
        stages.append(MapStage(kernel, weight, seed))
    return [*stages, OutputStage(kernel, weight, seed)]


def _without_closed_form(kernel: Kernel) -> list[nn.Parameter]:
    """The parameters that gradient descent fits."""
    wanted = [kernel.query_map, kernel.key_map]
    if isinstance(kernel, FittedKernel):
        wanted += [kernel.query_weight, kernel.query_bias, kernel.key_weight, kernel.key_bias]
    elif kernel.query_map is not None and isinstance(kernel, LatteKernel):
        wanted += [kernel.alpha, kernel.delta_q] if kernel.tte else [kernel.delta_q]
    return [parameter for parameter in wanted if parameter is not None]
