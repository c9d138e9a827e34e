"""How sensitive each site is to linear attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from latte_convert.adapters.convert import identity
from latte_convert.adapters.host import Host, require_calls
from latte_convert.attention import AttentionSite
from latte_convert.data.feed import Feed
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.agreement import Agreement, merge_all
from latte_convert.progress import Progress, silent
from latte_convert.work import Work


@dataclass(frozen=True)
class Score:
    """Sensitivity of one site; low means robust.

    Attributes:
        value: ``(1 - cosine) + mse_weight · mse``; infinite where the converted output is not finite.
        cosine: Mean cosine of the block's output tokens, original against converted.
        mse: Mean squared difference per element of the block's output.
    """

    value: float
    cosine: float
    mse: float


def paper_scores(
    host: Host,
    sites: Sequence[AttentionSite],
    kernels: Mapping[str, Kernel],
    feed: Feed,
    *,
    mse_weight: float = 10.0,
    work: Work | None = None,
    progress: Progress = silent,
) -> dict[str, Score]:
    """The source paper's sensitivity: block outputs of the original against those with every site linearised.

    ``I_l = (1 - mean_i cos(a_i, a~_i)) + lambda · ||A - A~||²_F / (B N d)`` over the output tokens of the block
    that site ``l`` sits in. It sees neither what layers do to each other nor the task.

    Args:
        host: The original; left as it was.
        sites: The sites to score.
        kernels: The fitted kernel of each of them.
        feed: Calibration inputs.
        mse_weight: The paper's lambda.
        work: What is kept of earlier runs, and keeps what this one does.
        progress: Told of every sample.

    Returns:
        The score of each site, by name.
    """
    blocks = {site.name: host.block(site.name) for site in sites}
    converted = {name: kernels[name] for name in blocks}

    def compared(missing: Sequence[int]) -> Iterator[tuple[dict[str, Agreement], dict[str, int]]]:
        advance = progress("Scoring", len(missing))
        for index in missing:
            inputs, agreements, calls = feed[index], dict[str, Agreement](), dict[str, int]()
            with host.outputs_of(blocks.values()) as outputs:
                host.run(inputs)
                original = dict(outputs)
                with host.convert(converted) as applied:
                    host.run(inputs)
                    for name, handler in applied.handlers.items():
                        calls[name] = handler.calls
                for block, output in original.items():
                    agreements[block] = Agreement()
                    agreements[block].add(output, outputs[block])
            advance()
            yield agreements, calls

    known = identity(converted) if work else {}
    pieces = (work or Work()).each(
        "scores", len(feed), compared, lambda index: [known, feed.identity(index)], (Agreement,)
    )
    require_calls({name: sum(calls[name] for _, calls in pieces) for name in blocks})
    agreements = {block: Agreement() for block in blocks.values()}
    for seen, _ in pieces:
        merge_all(agreements, seen)
    return {name: _score(agreements[block], mse_weight) for name, block in blocks.items()}


def _score(agreement: Agreement, mse_weight: float) -> Score:
    cosine, mse = agreement.cosine, agreement.mse
    value = (1 - cosine) + mse_weight * mse
    return Score(value if value == value else float("inf"), cosine, mse)
