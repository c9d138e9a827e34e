"""FLOPs of every site with every candidate kernel, counted from the calls that calibration samples cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from latte_convert.adapters.convert import Changes
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, CallShape, TokenLayout
from latte_convert.data.feed import Feed
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.selection.budget import SiteCost
from latte_convert.work import Work

if TYPE_CHECKING:
    from latte_convert.selection.trials import Candidates


class _Shapes:
    """Handler that counts the calls of a site by shape, and leaves them to the original."""

    def __init__(self) -> None:
        self.counts: Counter[CallShape] = Counter()

    def __call__(self, call: AttentionCall) -> Tensor | None:
        self.counts[call.shape] += call.query.shape[0]
        return None


def merged_share(host: Host, candidates: Candidates, changes: Changes, feed: Feed) -> float:
    """Share of the exact attention FLOPs that a plan leaves which merges tokens, counted in a run of it."""
    exact = left = 0
    for inputs in feed:
        shapes = {site: _Shapes() for site in candidates}
        with host.watch(shapes):
            host.run(inputs)
        with host.convert(changes) as applied:
            host.run(inputs)
            ran = applied.shapes
        for site, seen in shapes.items():
            whole = sum(softmax_flops(shape) * count for shape, count in seen.counts.items())
            kernel = changes.get(site)
            exact += whole
            if site not in ran:
                left += whole
            else:
                left += kernel.flops(ran[site]) if isinstance(kernel, Kernel) else softmax_flops(ran[site])
    return left / exact if exact else 1.0


def site_costs(
    host: Host, candidates: Candidates, feed: Feed, *, min_tokens: int = 0, work: Work | None = None
) -> dict[str, SiteCost]:
    """Run the original once over the samples and count what attention costs.

    Args:
        host: The original; left as it was.
        candidates: The kernels of each site; a site without any counts as exact.
        feed: Calibration inputs.
        min_tokens: With fewer keys than this, a kernel costs what the exact branch does.
        work: What is kept of earlier runs, and keeps what this one does.

    Returns:
        The cost of each site, by name, in the order of ``candidates``.

    Raises:
        OutputError: Work cannot be kept.
    """

    def counted(missing: Sequence[int]) -> Iterator[dict[str, dict[CallShape, int]]]:
        for index in missing:
            shapes = {site: _Shapes() for site in candidates}
            with host.watch(shapes):
                host.run(feed[index])
            yield {site: dict(seen.counts) for site, seen in shapes.items()}

    pieces = (work or Work()).each(
        "shapes", len(feed), counted, lambda index: [list(candidates), feed.identity(index)], (CallShape, TokenLayout)
    )
    return {site: _cost(kernels, [piece[site] for piece in pieces], min_tokens) for site, kernels in candidates.items()}


def _cost(kernels: Sequence[Kernel], seen: Iterable[Mapping[CallShape, int]], min_tokens: int) -> SiteCost:
    """What calls of some shapes cost, each so often."""
    counts: Counter[CallShape] = Counter()
    for each in seen:
        counts.update(each)
    return SiteCost(
        idle=tuple(
            bool(counts) and all(kernel.is_softmax(kernel.inner(shape)) for shape in counts) for kernel in kernels
        ),
        exact=sum(softmax_flops(shape) * count for shape, count in counts.items()),
        kernels=tuple(
            sum(
                (kernel.flops(shape) if shape.keys >= min_tokens else softmax_flops(shape)) * count
                for shape, count in counts.items()
            )
            for kernel in kernels
        ),
    )
