"""Calibration: run the original model over the samples and fit every site from what its attention sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from latte_convert.adapters.host import Host, require_calls
from latte_convert.attention import AttentionSite, Handler, SiteCall
from latte_convert.calibration.fit import Fit, SiteFit
from latte_convert.data.feed import Feed
from latte_convert.kernels.base import Kernel
from latte_convert.progress import Progress, silent
from latte_convert.recipe import Candidate


class _Stop(Exception):
    """Ends a forward pass once the site of interest has been seen."""


class _Recorder:
    """Handler that lets fits watch a site while the original computes it."""

    def __init__(self, fits: Sequence[SiteFit]) -> None:
        self.fits = fits
        self.calls = 0

    def __call__(self, call: SiteCall) -> Tensor | None:
        self.calls += 1
        if call.obstacle is not None:
            for fit in self.fits:
                fit.failure = call.obstacle
            return None
        target = call.exact()
        for fit in self.fits:
            fit.observe(call, target)
        return target


def calibrate(
    host: Host,
    sites: Sequence[AttentionSite],
    candidates: Sequence[Candidate],
    feed: Feed,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, list[Fit]]:
    """Fit every candidate kernel to every site, on the inputs the site gets in the original model.

    Args:
        host: The original; only read.
        sites: The sites to fit.
        candidates: The kernels to fit.
        feed: Calibration inputs.
        seed: Seed of the choice of tokens.
        progress: Told of every sample.

    Returns:
        The fits of each site, by name, in the order of the candidates.

    Raises:
        CheckpointError: A site is never called, so what it computes is not what the model uses.
    """
    fits = {
        site.name: [SiteFit(site, c, host.output_projection(site.name), seed) for c in candidates] for site in sites
    }
    passes = max((fit.passes for each in fits.values() for fit in each), default=0)
    advance = progress("Calibrating", passes * len(feed))
    for _ in range(passes):
        recorders = {name: _Recorder(each) for name, each in fits.items()}
        with host.watch(recorders):
            for inputs in feed:
                host.run(inputs)
                advance()
        require_calls({name: recorder.calls for name, recorder in recorders.items()})
        for each in fits.values():
            for fit in each:
                fit.end_pass()
    return {name: [fit.result() for fit in each] for name, each in fits.items()}


def recalibrate(
    host: Host,
    sites: Sequence[AttentionSite],
    candidates: Mapping[str, Candidate],
    feed: Feed,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Fit]:
    """Fit sites one after another, each on the inputs it gets behind the converted ones before it.

    The order is that of execution; each pass stops at the site it is for. The model is left as it was.

    Args:
        host: As in ``calibrate``.
        sites: The sites, in order of execution.
        candidates: The kernel that each of them gets, by name.
        feed: As in ``calibrate``.
        seed: As in ``calibrate``.
        progress: As in ``calibrate``.
    """
    fits: dict[str, Fit] = {}
    kernels: dict[str, Kernel] = {}
    work = [SiteFit(site, candidates[site.name], host.output_projection(site.name), seed) for site in sites]
    advance = progress("Refitting on converted inputs", sum(fit.passes for fit in work) * len(feed))
    for fit in work:
        site, recorder = fit.site, _Recorder([fit])

        def stop_after(call: SiteCall, recorder: _Recorder = recorder) -> Tensor | None:
            recorder(call)
            raise _Stop

        with host.convert(kernels), host.watch({site.name: stop_after}):
            for _ in range(fit.passes):
                for inputs in feed:
                    with suppress(_Stop):
                        host.run(inputs)
                    advance()
                fit.end_pass()
        require_calls({site.name: recorder.calls})
        fits[site.name] = fit.result()
        if (kernel := fits[site.name].kernel) is not None:
            kernels[site.name] = kernel
    return fits


def execution_order(host: Host, sites: Iterable[str], feed: Feed) -> list[str]:
    """Names of sites in the order in which forward passes over the samples call them."""
    order: list[str] = []

    def note(name: str) -> Handler:
        def handler(_call: SiteCall) -> Tensor | None:
            order.append(name)
            return None

        return handler

    with host.watch({name: note(name) for name in sites}):
        for inputs in feed:
            host.run(inputs)
    return list(dict.fromkeys(order))
