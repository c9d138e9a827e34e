"""How sensitive each site is to linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from latte_convert.adapters.capture import outputs_of, require_calls
from latte_convert.adapters.convert import apply
from latte_convert.adapters.find import enclosing_block
from latte_convert.attention import Adapter, AttentionSite
from latte_convert.data.feed import Feed, run
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.agreement import Agreement
from latte_convert.progress import Progress, silent


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
    model: nn.Module,
    adapter: Adapter,
    sites: Sequence[AttentionSite],
    kernels: Mapping[str, Kernel],
    feed: Feed,
    *,
    mse_weight: float = 10.0,
    progress: Progress = silent,
) -> dict[str, Score]:
    """The source paper's sensitivity: block outputs of the original against those with every site linearised.

    ``I_l = (1 - mean_i cos(a_i, a~_i)) + lambda · ||A - A~||²_F / (B N d)`` over the output tokens of the block
    that site ``l`` sits in. It sees neither what layers do to each other nor the task.

    Args:
        model: The original model; left as it was.
        adapter: The adapter of its library.
        sites: The sites to score.
        kernels: The fitted kernel of each of them.
        feed: Calibration inputs.
        mse_weight: The paper's lambda.
        progress: Told of every sample.

    Returns:
        The score of each site, by name.
    """
    blocks = {site.name: enclosing_block(model, site.name) for site in sites}
    agreements = {block: Agreement() for block in blocks.values()}
    calls = dict.fromkeys(blocks, 0)
    advance = progress("Scoring", len(feed))
    for inputs in feed:
        with outputs_of(model, agreements) as outputs:
            run(model, inputs)
            original = dict(outputs)
            with apply(model, adapter, {name: kernels[name] for name in blocks}) as applied:
                run(model, inputs)
                for name, handler in applied.handlers.items():
                    calls[name] += handler.calls
            for block, output in original.items():
                agreements[block].add(output, outputs[block])
        advance()
    require_calls(calls)
    return {name: _score(agreements[block], mse_weight) for name, block in blocks.items()}


def _score(agreement: Agreement, mse_weight: float) -> Score:
    cosine, mse = agreement.cosine, agreement.mse
    value = (1 - cosine) + mse_weight * mse
    return Score(value if value == value else float("inf"), cosine, mse)
