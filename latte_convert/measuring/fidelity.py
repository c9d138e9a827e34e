"""Fidelity: how far the hybrid's outputs are from the original's, on samples that nothing was fitted to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from latte_convert.adapters.host import Host, require_calls
from latte_convert.attention import AttentionSite, CallShape, SiteCall
from latte_convert.data.feed import Feed, Inputs
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.agreement import Agreement
from latte_convert.progress import Progress, silent

_MODEL_OUTPUTS = ("image_embeds", "text_embeds", "logits", "last_hidden_state")
_TOWER_OUTPUTS = ("pooler_output", "last_hidden_state")


def primary_output(names: Iterable[str], *, tower: bool = False) -> str:
    """The output that stands for a model, or, pooled and projected, for one tower of it."""
    known = list(names)
    return next((name for name in (_TOWER_OUTPUTS if tower else _MODEL_OUTPUTS) if name in known), known[0])


@dataclass
class Fidelity:
    """What a pass over the held-out samples measured.

    Attributes:
        outputs: Agreement of every floating-point output of the model.
        blocks: Agreement of the output of every block that holds a site.
        sites: Agreement of each kernel's attention output with the exact one, on the original's inputs.
        shapes: What each site's calls look like, with the mean number of queries and keys.
        primaries: The output that stands for the model, or for each tower that samples reach.
        original_ms: Median wall time of the original on one sample.
        hybrid_ms: Median wall time of the hybrid on one sample.
    """

    outputs: dict[str, Agreement] = field(default_factory=dict)
    blocks: dict[str, Agreement] = field(default_factory=dict)
    sites: dict[str, Agreement] = field(default_factory=dict)
    shapes: dict[str, CallShape] = field(default_factory=dict)
    primaries: set[str] = field(default_factory=set)
    original_ms: float = 0.0
    hybrid_ms: float = 0.0

    @property
    def primary(self) -> str:
        """Name of the output that gates look at: the worst, where there are several towers."""
        return min(sorted(self.primaries), key=lambda name: self.outputs[name].cosine)


class _Watch:
    """Compares a kernel with the exact output of its site while the original runs."""

    def __init__(self, kernel: Kernel | None) -> None:
        self.kernel = kernel
        self.agreement = Agreement()
        self.shapes: list[CallShape] = []
        self.prefix = 0

    def __call__(self, call: SiteCall) -> Tensor | None:
        self.shapes.append(call.shape)
        self.prefix = call.layout.prefix
        if self.kernel is None or call.obstacle is not None:
            return None
        target = call.exact()
        self.agreement.add(target, self.kernel.to(call.query.device)(call))
        return target


def measure(
    host: Host,
    sites: Sequence[AttentionSite],
    kernels: Mapping[str, Kernel],
    feed: Feed,
    *,
    min_tokens: int = 0,
    progress: Progress = silent,
) -> Fidelity:
    """Run original and hybrid side by side, one sample at a time.

    Args:
        host: The original; left as it was.
        sites: All routable sites, converted or not; their shapes are recorded.
        kernels: The kernels of the converted sites.
        feed: Held-out inputs.
        min_tokens: As in the plan.
        progress: Told of every sample.

    Raises:
        CheckpointError: A converted site is never called.
    """
    result = Fidelity()
    watches = {site.name: _Watch(kernels.get(site.name)) for site in sites}
    blocks = list(dict.fromkeys(host.block(site.name) for site in sites))
    result.blocks = {block: Agreement() for block in blocks}
    calls = dict.fromkeys(kernels, 0)
    original_ms: list[float] = []
    hybrid_ms: list[float] = []
    advance = progress("Measuring on held-out samples", len(feed))
    for inputs in feed:
        with host.outputs_of(blocks) as outputs:
            with host.watch(watches):
                output = host.run(inputs)
            prefix = max((watch.prefix for watch in watches.values()), default=0)
            original = dict(named_outputs(output, prefix))
            seen = dict(outputs)
            with host.convert(kernels, min_tokens=min_tokens) as applied:
                hybrid = dict(named_outputs(host.run(inputs), prefix))
                for name, handler in applied.handlers.items():
                    calls[name] += handler.calls
            for block, tensor in seen.items():
                result.blocks[block].add(tensor, outputs[block])
        place = f"{inputs.tower}." if inputs.tower else ""
        result.primaries.add(place + primary_output(original, tower=bool(inputs.tower)))
        for name, tensor in original.items():
            full = place + name
            result.outputs.setdefault(full, Agreement()).add(tensor, hybrid[name])
        original_ms.append(_milliseconds(host, inputs))
        with host.convert(kernels, min_tokens=min_tokens):
            hybrid_ms.append(_milliseconds(host, inputs))
        advance()
    require_calls(calls)
    result.sites = {name: watches[name].agreement for name in kernels}
    result.shapes = {name: _mean_shape(watch.shapes) for name, watch in watches.items() if watch.shapes}
    result.original_ms, result.hybrid_ms = statistics.median(original_ms), statistics.median(hybrid_ms)
    return result


def speedup(host: Host, kernels: Mapping[str, Kernel], feed: Feed, *, min_tokens: int = 0, runs: int = 3) -> float:
    """How many times faster the hybrid is, end to end: the ratio of the shortest of some runs, taken in turns."""
    ratios = []
    for inputs in feed:
        host.run(inputs)
        with host.convert(kernels, min_tokens=min_tokens):
            host.run(inputs)
        original, hybrid = [], []
        for _ in range(runs):
            original.append(_milliseconds(host, inputs))
            with host.convert(kernels, min_tokens=min_tokens):
                hybrid.append(_milliseconds(host, inputs))
        ratios.append(min(original) / min(hybrid))
    return statistics.median(ratios)


def _mean_shape(shapes: Sequence[CallShape]) -> CallShape:
    """The shape of a typical call: the one where all are alike, mean numbers of tokens where they are not."""
    if len(set(shapes)) == 1:
        return shapes[0]
    queries = round(statistics.fmean(shape.queries for shape in shapes))
    keys = round(statistics.fmean(shape.keys for shape in shapes))
    return replace(shapes[0], queries=queries, keys=keys, layout=replace(shapes[0].layout, grid=None))


def named_outputs(output: Any, prefix: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Floating-point outputs with a feature dimension, by name.

    Args:
        output: What a model returned: a tensor, a tuple, or a mapping such as a ``ModelOutput``.
        prefix: Where positive, ``last_hidden_state`` is also split into ``.prefix`` and ``.patches``.
    """
    if isinstance(output, Tensor):
        output = {"output": output}
    if isinstance(output, tuple | list):
        output = {f"output.{i}": item for i, item in enumerate(output)}
    for name, value in output.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            continue
        yield name, value
        if prefix and name == "last_hidden_state" and value.shape[1] > prefix:
            yield f"{name}.prefix", value[:, :prefix]
            yield f"{name}.patches", value[:, prefix:]


def _milliseconds(host: Host, inputs: Inputs) -> float:
    """Wall time of a second, undisturbed run: the first one has warmed every cache."""
    _synchronize()
    start = time.perf_counter()
    host.run(inputs)
    _synchronize()
    return (time.perf_counter() - start) * 1000


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
