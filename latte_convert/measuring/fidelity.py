"""Fidelity: how far the hybrid's outputs are from the original's, on samples that nothing was fitted to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from latte_convert.adapters.convert import Changes, identity
from latte_convert.adapters.host import Host, require_calls
from latte_convert.attention import AttentionSite, CallShape, SiteCall, TokenLayout
from latte_convert.data.feed import Feed, Inputs
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.agreement import Agreement, merge_all
from latte_convert.measuring.outputs import add_outputs, final_outputs, named_outputs
from latte_convert.measuring.times import milliseconds, nothing
from latte_convert.progress import Progress, silent
from latte_convert.work import Work


@dataclass
class Fidelity:
    """What a pass over the held-out samples measured.

    Attributes:
        outputs: Agreement of every floating-point output of the model.
        blocks: Agreement of the output of every block that holds a site.
        sites: Agreement of each kernel's attention output with the exact one, on the original's inputs.
        shapes: What each site's calls look like, with the mean number of queries and keys.
        left: The same in the hybrid, where tokens are merged; other sites are as in ``shapes``.
        primaries: The outputs that stand for the model, or for each tower that samples reach.
        original_ms: Median wall time of the original on one sample.
        hybrid_ms: Median wall time of the hybrid on one sample.
        free_ms: Median wall time on one sample with the attention of all sites left out: what no kernel can go below.
    """

    outputs: dict[str, Agreement] = field(default_factory=dict)
    blocks: dict[str, Agreement] = field(default_factory=dict)
    sites: dict[str, Agreement] = field(default_factory=dict)
    shapes: dict[str, CallShape] = field(default_factory=dict)
    left: dict[str, CallShape] = field(default_factory=dict)
    primaries: set[str] = field(default_factory=set)
    original_ms: float = 0.0
    hybrid_ms: float = 0.0
    free_ms: float = 0.0

    @property
    def speedup(self) -> float:
        """How many times faster than the original the hybrid was, end to end."""
        return self.original_ms / self.hybrid_ms if self.hybrid_ms else 1.0

    @property
    def ceiling(self) -> float:
        """Speed-up that no attention kernel can pass (Amdahl): attention taken for nothing."""
        return self.original_ms / self.free_ms if self.free_ms else 1.0

    @property
    def primary(self) -> str:
        """Name of the output that gates look at: of those that stand for the model, the least alike."""
        return min(sorted(self.primaries), key=lambda name: self.outputs[name].likeness)


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


@dataclass
class _Seen:
    """What one held-out sample showed; fields as in ``Fidelity``, with every call, and milliseconds in its order."""

    outputs: dict[str, Agreement] = field(default_factory=dict)
    blocks: dict[str, Agreement] = field(default_factory=dict)
    sites: dict[str, Agreement] = field(default_factory=dict)
    shapes: dict[str, list[CallShape]] = field(default_factory=dict)
    left: dict[str, CallShape] = field(default_factory=dict)
    primaries: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    milliseconds: tuple[float, float, float] = (0.0, 0.0, 0.0)


_DATA = (_Seen, Agreement, CallShape, TokenLayout)


def measure(
    host: Host,
    sites: Sequence[AttentionSite],
    changes: Changes,
    feed: Feed,
    *,
    min_tokens: int = 0,
    work: Work | None = None,
    progress: Progress = silent,
) -> Fidelity:
    """Run original and hybrid side by side, one sample at a time.

    Args:
        host: The original; left as it was.
        sites: All routable sites, converted or not; their shapes are recorded.
        changes: The kernels of the converted sites, and the blocks whose tokens are merged.
        feed: Held-out inputs.
        min_tokens: As in the plan.
        work: What is kept of earlier runs, and keeps what this one does.
        progress: Told of every sample.

    Raises:
        CheckpointError: A converted site is never called.
        OutputError: Work cannot be kept.
    """
    names = [site.name for site in sites]

    def measured(missing: Sequence[int]) -> Iterator[_Seen]:
        advance = progress("Measuring on held-out samples", len(missing))
        for index in missing:
            yield _measured(host, names, changes, feed[index], min_tokens)
            advance()

    known = [names, identity(changes), min_tokens] if work else []
    pieces = (work or Work()).each("measured", len(feed), measured, lambda i: [known, feed.identity(i)], _DATA)
    kernels = [name for name, change in changes.items() if isinstance(change, Kernel)]
    require_calls({name: sum(piece.calls[name] for piece in pieces) for name in kernels})
    result = Fidelity(sites={name: Agreement() for name in kernels})
    shapes: dict[str, list[CallShape]] = {}
    left: dict[str, list[CallShape]] = {}
    for piece in pieces:
        for ours, theirs in (
            (result.outputs, piece.outputs), (result.blocks, piece.blocks), (result.sites, piece.sites)
        ):  # fmt: skip
            merge_all(ours, theirs)
        for name, seen in piece.shapes.items():
            shapes.setdefault(name, []).extend(seen)
        for name, shape in piece.left.items():
            left.setdefault(name, []).append(shape)
        result.primaries |= piece.primaries
    result.shapes = {name: _mean_shape(seen) for name, seen in shapes.items() if seen}
    result.left = {name: _mean_shape(seen) for name, seen in left.items()}
    times = zip(*(piece.milliseconds for piece in pieces), strict=True)
    result.original_ms, result.hybrid_ms, result.free_ms = map(statistics.median, times)
    return result


def _measured(host: Host, sites: Sequence[str], changes: Changes, inputs: Inputs, min_tokens: int) -> _Seen:
    """Run original and hybrid side by side on one sample."""
    kernels = {name: change for name, change in changes.items() if isinstance(change, Kernel)}
    watches = {name: _Watch(kernels.get(name)) for name in sites}
    blocks = list(dict.fromkeys(map(host.block, sites)))
    seen = _Seen(blocks={block: Agreement() for block in blocks}, calls=dict.fromkeys(kernels, 0))
    with host.outputs_of(blocks) as outputs:
        with host.watch(watches):
            output = host.run(inputs)
        prefix = max((watch.prefix for watch in watches.values()), default=0)
        original = dict(named_outputs(output, prefix))
        before = dict(outputs)
        with host.convert(changes, min_tokens=min_tokens) as applied:
            hybrid = dict(named_outputs(host.run(inputs), prefix))
            for name, handler in applied.handlers.items():
                seen.calls[name] += handler.calls
            seen.left = dict(applied.shapes)
        for block, tensor in before.items():
            seen.blocks[block].add(tensor, outputs[block])
    place = f"{inputs.tower}." if inputs.tower else ""
    seen.primaries = set(final_outputs(output, inputs))
    add_outputs(
        seen.outputs,
        host.model,
        {place + name: tensor for name, tensor in original.items()},
        {place + name: tensor for name, tensor in hybrid.items()},
    )
    original_ms = milliseconds(host, inputs)
    with host.convert(changes, min_tokens=min_tokens):
        hybrid_ms = milliseconds(host, inputs)
    with host.watch(dict.fromkeys(watches, nothing)):
        free_ms = milliseconds(host, inputs)
    seen.milliseconds = (original_ms, hybrid_ms, free_ms)
    seen.sites = {name: watches[name].agreement for name in kernels}
    seen.shapes = {name: watch.shapes for name, watch in watches.items()}
    return seen


def _mean_shape(shapes: Sequence[CallShape]) -> CallShape:
    """The shape of a typical call: the one where all are alike, mean numbers of tokens where they are not."""
    if len(set(shapes)) == 1:
        return shapes[0]
    queries = round(statistics.fmean(shape.queries for shape in shapes))
    keys = round(statistics.fmean(shape.keys for shape in shapes))
    return replace(shapes[0], queries=queries, keys=keys, layout=replace(shapes[0].layout, grid=None))
