"""Model inputs, one sample at a time: padding never enters a statistic, and memory does not depend on their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from latte_convert.data.samples import Modality, Sample, SampleSet

Batch = dict[str, Any]
"""Keyword arguments of a model."""


class Processor(Protocol):
    """A checkpoint's own preprocessing for one modality.

    Attributes:
        modality: What the samples are.
        sampling_rate: Of the waveforms it takes, in Hz; None where it takes none.
        truncated: Ids of the samples that were longer than the model takes.
    """

    modality: Modality
    sampling_rate: int | None
    truncated: set[str]

    def prepare(self, sample: Sample, model: nn.Module) -> Batch:
        """Turn a sample into the keyword arguments of ``model``, batch size 1, on the CPU."""

    def method(self, model: nn.Module) -> str:
        """The method that takes these samples: ``forward``, or that of one tower."""

    def towers(self, model: nn.Module) -> set[str] | None:
        """The towers that these samples reach, or None where they reach all of the model."""


@dataclass(frozen=True)
class Inputs:
    """One call of a model.

    Attributes:
        kwargs: Keyword arguments, batch size 1.
        method: Method to call: ``forward``, or that of one tower.
        tower: Name of that tower; empty for the whole model.
    """

    kwargs: Batch
    method: str = "forward"
    tower: str = ""


class Feed(Protocol):
    """Model inputs that can be iterated again and again."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Inputs]: ...


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> Any:
    """Run a model, or one tower of it, without gradients."""
    return model(**inputs.kwargs) if inputs.method == "forward" else getattr(model, inputs.method)(**inputs.kwargs)


class BatchFeed:
    """Ready-made batches of keyword arguments, for models that are already in memory.

    Args:
        batches: Dictionaries of tensors; give each sample its own, so that padding enters no statistic.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Inputs]:
        return map(Inputs, self.batches)


class SampleFeed:
    """Inputs of a sample set, decoded and prepared again on every iteration.

    Args:
        samples: The samples.
        processor: The checkpoint's preprocessing.
        model: The model, for its device and dtype.
    """

    def __init__(self, samples: SampleSet, processor: Processor, model: nn.Module) -> None:
        self.samples = samples
        self.processor = processor
        self._model = model

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Inputs]:
        parameter = next(self._model.parameters())
        towers = self.processor.towers(self._model)
        for sample in self.samples:
            batch = self.processor.prepare(sample, self._model)
            yield Inputs(
                {key: place(value, parameter) for key, value in batch.items()},
                self.processor.method(self._model),
                "+".join(sorted(towers)) if towers is not None else "",
            )


class JoinedFeed:
    """Several feeds one after another: images for one tower, texts for the other.

    Args:
        feeds: The feeds.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = feeds

    def __len__(self) -> int:
        return sum(len(feed) for feed in self.feeds)

    def __iter__(self) -> Iterator[Inputs]:
        return chain.from_iterable(self.feeds)


class FirstOf:
    """The first samples of a feed, of each of its parts where it is joined.

    Args:
        feed: The feed.
        count: Number of samples; of each part, where there are several.
    """

    def __init__(self, feed: Feed, count: int) -> None:
        self.parts = feed.feeds if isinstance(feed, JoinedFeed) else [feed]
        self.count = count

    def __len__(self) -> int:
        return sum(min(len(part), self.count) for part in self.parts)

    def __iter__(self) -> Iterator[Inputs]:
        return chain.from_iterable(islice(part, self.count) for part in self.parts)


def place(value: Any, like: Tensor) -> Any:
    """Move a tensor to the device of ``like``, and to its dtype where it is floating point."""
    if not isinstance(value, Tensor):
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else None)
