"""Calibration: run the original model over the samples and fit every site from what its attention sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from torch import Tensor, nn

from latte_convert.adapters.base import Adapter, AttentionCall, AttentionSite, Handler
from latte_convert.calibration.capture import routed
from latte_convert.calibration.feed import Feed, run
from latte_convert.calibration.fit import Fit, LatteFit
from latte_convert.errors import CheckpointError
from latte_convert.kernels.base import Kernel
from latte_convert.recipe import Recipe
from latte_convert.rewrite.apply import apply

Progress = Callable[[str, int], Callable[[], None]]
"""``progress(title, total)`` opens a step and returns a function that advances it by one."""


def silent(_title: str, _total: int) -> Callable[[], None]:
    """A progress that shows nothing."""
    return lambda: None


class _Stop(Exception):
    """Ends a forward pass once the site of interest has been seen."""


class _Recorder:
    """Handler that lets a fit watch a site while the original computes it."""

    def __init__(self, fit: LatteFit) -> None:
        self.fit = fit
        self.calls = 0

    def __call__(self, call: AttentionCall) -> Tensor | None:
        self.calls += 1
        if call.obstacle is not None:
            self.fit.failure = call.obstacle
            return None
        target = call.exact()
        self.fit.observe(call, target)
        return target


def calibrate(
    model: nn.Module,
    adapter: Adapter,
    sites: Sequence[AttentionSite],
    feed: Feed,
    recipe: Recipe,
    progress: Progress = silent,
) -> dict[str, Fit]:
    """Fit every site on the inputs it gets in the original model.

    Args:
        model: The original model; only read.
        adapter: The adapter of its library.
        sites: The sites to fit.
        feed: Calibration inputs.
        recipe: Granularity and switches.
        progress: Told of every sample.

    Returns:
        The fit of each site, by name.

    Raises:
        CheckpointError: A site is never called, so what it computes is not what the model uses.
    """
    fits = {site.name: LatteFit(site, recipe, adapter.output_projection(model, site.name)) for site in sites}
    passes = max((fit.passes for fit in fits.values()), default=0)
    advance = progress("Calibrating", passes * len(feed))
    for _ in range(passes):
        recorders = {name: _Recorder(fit) for name, fit in fits.items()}
        with routed(model, adapter, recorders):
            for inputs in feed:
                run(model, inputs)
                advance()
        require_calls({name: recorder.calls for name, recorder in recorders.items()})
        for fit in fits.values():
            fit.end_pass()
    return {name: fit.result() for name, fit in fits.items()}


def recalibrate(
    model: nn.Module,
    adapter: Adapter,
    sites: Sequence[AttentionSite],
    feed: Feed,
    recipe: Recipe,
    progress: Progress = silent,
) -> dict[str, Fit]:
    """Fit sites one after another, each on the inputs it gets behind the converted ones before it.

    The order is that of execution; each pass stops at the site it is for. The model is left as it was.

    Args and errors are those of ``calibrate``.
    """
    fits: dict[str, Fit] = {}
    kernels: dict[str, Kernel] = {}
    passes = 3 if recipe.sigma else 2
    advance = progress("Refitting on converted inputs", passes * len(feed) * len(sites))
    for site in sites:
        fit = LatteFit(site, recipe, adapter.output_projection(model, site.name))
        recorder = _Recorder(fit)

        def stop_after(call: AttentionCall, recorder: _Recorder = recorder) -> Tensor | None:
            recorder(call)
            raise _Stop

        with apply(model, adapter, kernels), routed(model, adapter, {site.name: stop_after}):
            for _ in range(fit.passes):
                for inputs in feed:
                    with suppress(_Stop):
                        run(model, inputs)
                    advance()
                fit.end_pass()
        require_calls({site.name: recorder.calls})
        fits[site.name] = fit.result()
        if (kernel := fits[site.name].kernel) is not None:
            kernels[site.name] = kernel
    return fits


def execution_order(model: nn.Module, adapter: Adapter, sites: Iterable[str], feed: Feed) -> list[str]:
    """Names of sites in the order in which forward passes over the samples call them."""
    order: list[str] = []

    def note(name: str) -> Handler:
        def handler(_call: AttentionCall) -> Tensor | None:
            order.append(name)
            return None

        return handler

    with routed(model, adapter, {name: note(name) for name in sites}):
        for inputs in feed:
            run(model, inputs)
    return list(dict.fromkeys(order))


def require_calls(calls: Mapping[str, int]) -> None:
    """Stop where a site was never called: a fused path skips it, and converting it would change nothing.

    Raises:
        CheckpointError: Naming the sites.
    """
    silent_sites = [name for name, count in calls.items() if count == 0]
    if silent_sites:
        shown = ", ".join(silent_sites[:3]) + (", …" if len(silent_sites) > 3 else "")
        raise CheckpointError(
            f"{len(silent_sites)} attention sites were never called by the calibration inputs ({shown}): a fused "
            "path or another tower computes the output. Exclude them, or give inputs that reach them."
        )
