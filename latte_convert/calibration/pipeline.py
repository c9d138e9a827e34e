"""Calibration: run the original model over the samples and fit every site from what its attention sees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from latte_convert import processes
from latte_convert.adapters.host import Host, require_calls
from latte_convert.attention import AttentionSite, Handler, SiteCall
from latte_convert.calibration.fit import Fit, SiteFit
from latte_convert.data.feed import Feed
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.progress import Progress, silent
from latte_convert.recipe import Candidate
from latte_convert.work import Work


class _Stop(Exception):
    """Ends a forward pass once the site of interest has been seen."""


class _Recorder:
    """Handler that lets fits watch a site while the original computes it.

    Attributes:
        fits: The fits; without any the site is computed as if there were some, so that those behind it see the same.
    """

    def __init__(self, fits: Sequence[SiteFit] = ()) -> None:
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


class _Fitting:
    """Fits sites in passes over the samples, some sites at a time.

    Every site is computed alike in every pass, whichever sites are being fitted: how a fit comes out does not depend on
    that. A pass ends behind the last call that its sites get, which the first pass over a sample has shown.
    """

    def __init__(self, host: Host, sites: Sequence[AttentionSite], feed: Feed) -> None:
        self.host, self.sites, self.feed = host, sites, feed
        self._calls: dict[int, list[str]] = {}

    def fit(self, fits: Mapping[str, Sequence[SiteFit]], advance: Callable[[], None]) -> None:
        """Fit the sites of a group, by name."""
        for _ in range(passes_of(fits)):
            recorders = {site.name: _Recorder(fits.get(site.name, ())) for site in self.sites}
            for index in range(len(self.feed)):
                self._run(index, recorders, fits)
                advance()
            require_calls({name: recorders[name].calls for name in fits})
            for each in fits.values():
                for fit in each:
                    fit.end_pass()

    def _run(self, index: int, recorders: Mapping[str, _Recorder], fits: Collection[str]) -> None:
        """Run the original on one sample, as far as the sites of the group reach."""
        seen, known = list[str](), self._calls.get(index)
        last = None if known is None else max((n for n, name in enumerate(known, 1) if name in fits), default=0)
        if last == 0:
            return

        def noting(name: str) -> Handler:
            def handler(call: SiteCall) -> Tensor | None:
                seen.append(name)
                target = recorders[name](call)
                if len(seen) == last:
                    raise _Stop
                return target

            return handler

        with self.host.watch({name: noting(name) for name in recorders}), suppress(_Stop):
            self.host.run(self.feed[index])
        self._calls.setdefault(index, seen)


def passes_of(fits: Mapping[str, Sequence[SiteFit]]) -> int:
    """Passes over the samples that fits take together."""
    return max((fit.passes for each in fits.values() for fit in each), default=0)


def calibrate(
    host: Host,
    sites: Sequence[AttentionSite],
    candidates: Sequence[Candidate],
    feed: Feed,
    *,
    seed: int = 0,
    work: Work | None = None,
    progress: Progress = silent,
) -> dict[str, list[Fit]]:
    """Fit every candidate kernel to every site, on the inputs the site gets in the original model.

    All sites are fitted in the same passes, of each process those that fall to it. Where work is kept each site has its
    own, which end behind it.

    Args:
        host: The original; only read.
        sites: The sites to fit.
        candidates: The kernels to fit.
        feed: Calibration inputs.
        seed: Seed of the choice of tokens.
        work: What is kept of earlier runs, and keeps what this one does.
        progress: Told of every sample.

    Returns:
        The fits of each site, by name, in the order of the candidates.

    Raises:
        CheckpointError: A site is never called, so what it computes is not what the model uses.
        OutputError: Work cannot be kept.
    """
    work = work or Work()
    parts = len(sites) if work.store else min(processes.size(), len(sites))
    groups = [list(sites[part::parts]) for part in range(parts)]
    fitting = _Fitting(host, sites, feed)

    def unfitted(group: Sequence[AttentionSite]) -> dict[str, list[SiteFit]]:
        return {site.name: [_unfitted(host, site, c, seed) for c in candidates] for site in group}

    def fitted(missing: Sequence[int]) -> Iterator[dict[str, list[dict[str, Any]]]]:
        wanted = [unfitted(groups[index]) for index in missing]
        advance = progress("Calibrating", sum(map(passes_of, wanted)) * len(feed))
        for fits in wanted:
            fitting.fit(fits, advance)
            yield {name: [fit.record() for fit in each] for name, each in fits.items()}

    known = [(c.kernel, c.options, get_kernel(c.kernel).code()) for c in candidates]
    records: dict[str, list[dict[str, Any]]] = {}
    for piece in work.each("fits", len(groups), fitted, lambda i: [groups[i], known, seed, feed.identities()]):
        records |= piece
    return {
        site.name: [SiteFit.read(site, c, record) for c, record in zip(candidates, records[site.name], strict=True)]
        for site in sites
    }


def recalibrate(
    host: Host,
    sites: Sequence[AttentionSite],
    candidates: Mapping[str, Candidate],
    feed: Feed,
    *,
    seed: int = 0,
    work: Work | None = None,
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
        work: As in ``calibrate``.
        progress: As in ``calibrate``.
    """
    work = work or Work()
    fits: dict[str, Fit] = {}
    kernels: dict[str, Kernel] = {}
    unfitted = [_unfitted(host, site, candidates[site.name], seed) for site in sites]
    advance = progress("Refitting on converted inputs", sum(fit.passes for fit in unfitted) * len(feed))
    for fit in unfitted:
        site, candidate = fit.site, candidates[fit.site.name]
        known = [site, candidate.kernel, candidate.options, get_kernel(candidate.kernel).code(), seed]
        before = {name: kernel.identity() for name, kernel in kernels.items()}
        again = partial(_refitted, host, fit, kernels, feed, advance)
        record = work.once("refits", [known, before, feed.identities()], again)
        fits[site.name] = SiteFit.read(site, candidate, record)
        if (kernel := fits[site.name].kernel) is not None:
            kernels[site.name] = kernel
    return fits


def _unfitted(host: Host, site: AttentionSite, candidate: Candidate, seed: int) -> SiteFit:
    with host.weights_of(site.name):
        return SiteFit(site, candidate, host.output_projection(site.name), seed)


def _refitted(
    host: Host, fit: SiteFit, kernels: Mapping[str, Kernel], feed: Feed, advance: Callable[[], None]
) -> dict[str, Any]:
    """The fit of a site behind converted ones, as data."""
    recorder = _Recorder([fit])

    def stop_after(call: SiteCall) -> Tensor | None:
        recorder(call)
        raise _Stop

    with host.convert(kernels), host.watch({fit.site.name: stop_after}):
        for _ in range(fit.passes):
            for inputs in feed:
                with suppress(_Stop):
                    host.run(inputs)
                advance()
            fit.end_pass()
    require_calls({fit.site.name: recorder.calls})
    return fit.record()


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
