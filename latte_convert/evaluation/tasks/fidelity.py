"""``fidelity``: agreement of the two models' outputs and blocks, for any model and without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from latte_convert.adapters.host import Host
from latte_convert.data.examples import Example
from latte_convert.evaluation.features import prefix_tokens
from latte_convert.evaluation.tasks.base import Metric, Task
from latte_convert.evaluation.unlabelled import examples_of, open_unlabelled
from latte_convert.measuring.agreement import Agreement
from latte_convert.measuring.outputs import add_outputs, final_outputs, named_outputs

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.data.feed import Inputs

_Row = dict[str, npt.NDArray[np.float64]]
"""For each output: sum of cosines, tokens, squared error, squared norm, tokens with the same largest feature, and what
both share with its weight (see ``Agreement``)."""


class FidelityTask(Task):
    """Likeness of the final outputs, as the gates of a conversion see it; cosine, relative error and top-1 agreement.

    Likeness is the measure that fits an output: of boxes their intersection over union, of logits the probability that
    both models give to the same classes, else the cosine. Beside the metrics stand ``METRIC@OUTPUT`` for every output
    and every block with a converted or convertible site. Of several final outputs the worst counts, metric by metric.

    Data: whatever the model was calibrated on; two places, images and texts, for a two-tower model.
    """

    name = "fidelity"
    metrics = (Metric("likeness"), Metric("cosine"), Metric("relative_error", lower_is_better=True), Metric("top1"))
    note = (
        "The original is the reference: its own likeness, cosine and top-1 agreement are 1, its relative error is 0. "
        "Likeness is the overlap of boxes, the common probability of logits, the cosine of all else."
    )

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """Any model has outputs."""
        return None

    def open(self) -> Sequence[Example]:
        """Samples, without labels."""
        self._blocks: list[str] | None = None
        self._prefix = 0
        self._primaries: dict[str, None] = {}
        return examples_of(open_unlabelled(self.setting, self.setting.source.modalities))

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[Any]:
        """Every block's and every other output of each sample, by name."""
        host = Host.of(model)
        if self._blocks is None:  # first of all, so on the original
            self._blocks = list(dict.fromkeys(host.block(site.name) for site in host.sites() if site.eligible))
            self._prefix = prefix_tokens(model)
        with host.outputs_of(self._blocks) as blocks:
            output = host.run(inputs)
        tower = "" if inputs.method == "forward" else examples[0].modality
        self._model = model
        self._primaries |= dict.fromkeys(final_outputs(output, replace(inputs, tower=tower)))
        place = f"{tower}." if tower else ""
        outputs = named_outputs(output, self._prefix)
        named = {**{place + name: tensor for name, tensor in outputs}, **blocks}
        return [
            {name: _of_sample(tensor, i, len(examples)) for name, tensor in named.items()} for i in range(len(examples))
        ]

    def compare(self, original: Sequence[Any], hybrid: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Agreement of each sample's outputs, the original's with themselves and the hybrid's with the original's."""
        rows = [_agreement(self._model, a, b) for a, b in zip(original, hybrid, strict=True)]
        return [{name: _perfect(sums) for name, sums in row.items()} for row in rows], rows

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """The sums of every sample and output, ``(samples, outputs, 7)``; 0 for the outputs of another tower."""
        self._names = list(dict.fromkeys(name for row in predictions for name in row))
        empty = np.zeros(7)
        return np.stack([np.stack([row.get(name, empty) for name in self._names]) for row in predictions])

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Agreement over all tokens of all samples."""
        cosine, tokens, error, norm, same, shared, weight = np.asarray(records).sum(0).T
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(error == 0, 0.0, np.sqrt(error / norm))
            mean = cosine / tokens
            alike = np.minimum(mean, np.where(weight == 0, 1.0, shared / weight))
            columns = {"likeness": alike, "cosine": mean, "relative_error": relative, "top1": same / tokens}
        parts = {
            f"{metric}@{name}": float(values[i])
            for metric, values in columns.items()
            for i, name in enumerate(self._names)
            if {"likeness": name in self._primaries, "top1": name.endswith("logits")}.get(metric, True)
        }
        main = {}
        for metric in columns:
            finals = [parts[key] for name in self._primaries if (key := f"{metric}@{name}") in parts]
            if finals:
                main[metric] = max(finals) if metric == "relative_error" else min(finals)
        return {**main, **parts}


def _of_sample(tensor: Tensor, index: int, batch: int) -> Tensor:
    """The part of a block's output that belongs to one sample, whichever dimension its library batches on."""
    if tensor.shape[0] % batch:
        return tensor[:, index]
    # Windows of one image follow each other in the batch.
    size = tensor.shape[0] // batch
    return tensor[index * size : (index + 1) * size]


def _agreement(model: nn.Module, original: dict[str, Tensor], other: dict[str, Tensor]) -> _Row:
    agreements: dict[str, Agreement] = {}
    add_outputs(agreements, model, original, other)
    return {
        name: np.array([a.cosine_sum, a.tokens, a.squared_error, a.squared_norm, a.same, a.shared, a.weight])
        for name, a in agreements.items()
    }


def _perfect(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sums of an original compared with itself, from those of any comparison with it."""
    _, tokens, _, norm, _, _, weight = sums
    return np.array([tokens, tokens, 0.0, norm, tokens, weight, weight])
