"""The layer-local fit of a site: its kernel, and the stages that fill it in one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from latte_convert.attention import AttentionCall, AttentionSite
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.recipe import Candidate


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
        self.kernel = _unfitted(site, candidate)
        self.failure = self.kernel.obstacle(causal=site.causal, cross=site.kind == "cross", biased=site.biased)
        weight: Any = None if projection is None else projection.weight
        self.stages = self.kernel.fit_stages(None if weight is None else weight.detach().float(), seed)
        self.passes = sum(stage.passes for stage in self.stages)
        self._left = [stage for stage in self.stages for _ in range(stage.passes)]

    @classmethod
    def read(cls, site: AttentionSite, candidate: Candidate, record: Mapping[str, Any]) -> Fit:
        """The fit that a record is of."""
        if record["state"] is None:
            return Fit(None, reason=record["reason"])
        kernel = _unfitted(site, candidate)
        kernel.load_state_dict(record["state"])
        return Fit(kernel, error=record["error"])

    def record(self) -> dict[str, Any]:
        """The fit as data, after the last pass: tensors of its kernel, error, or the reason why there is none."""
        fit = self.result()
        state = None if fit.kernel is None else {n: t.cpu() for n, t in fit.kernel.state_dict().items()}
        return {"state": state, "error": fit.error, "reason": fit.reason}

    def observe(self, call: AttentionCall, target: Tensor) -> None:
        """Add one sample.

        Args:
            call: The call of the original model.
            target: Its exact attention output ``(B, H, Nq, dv)``.
        """
        for i in range(len(target)):
            if self.failure is not None or not self._left:
                return
            self._left[0].observe(call.sample(i).masked(), target[i].float())

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


def passes_for(site: AttentionSite, candidate: Candidate) -> int:
    """Passes over the samples that a fit takes."""
    return sum(stage.passes for stage in _unfitted(site, candidate).fit_stages(None, 0))


def _unfitted(site: AttentionSite, candidate: Candidate) -> Kernel:
    """A kernel as it is before its fit."""
    options = {**site.widths, **candidate.options}  # those of a kernel that is fitted again have its widths, too
    return get_kernel(candidate.kernel)(site.heads, site.head_dim, **options)
