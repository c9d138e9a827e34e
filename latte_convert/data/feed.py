"""Model inputs, one sample at a time: padding never enters a statistic, and memory does not depend on their number."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latte_convert import compat
from latte_convert.data.processor import Batch

if TYPE_CHECKING:
    from latte_convert.data.processor import Processor
    from latte_convert.data.samples import Sample, SampleSet

logger = logging.getLogger("latte_convert")


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


class Feed(ABC):
    """Model inputs that can be looked at again and again, in order or one by one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Inputs: ...

    @abstractmethod
    def identity(self, index: int) -> str:
        """What tells one input from every other: a digest of the sample it is made of, and what prepares it."""

    def __iter__(self) -> Iterator[Inputs]:
        return (self[index] for index in range(len(self)))

    def identities(self) -> list[str]:
        """Of all inputs, in order."""
        return [self.identity(index) for index in range(len(self))]


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call a model, or one tower of it.

    It gets a copy of the inputs: some models write into theirs, and the next one must see the same.
    """
    kwargs = compat.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs.kwargs)
    return (model if inputs.method == "forward" else getattr(model, inputs.method))(**kwargs)


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Run a model, or one tower of it, without gradients."""
    with torch.no_grad():
        return call(model, inputs)


class BatchFeed(Feed):
    """Ready-made batches of keyword arguments, for models that are already in memory.

    Args:
        batches: Dictionaries of tensors; give each sample its own, so that padding enters no statistic.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Inputs:
        return Inputs(self.batches[index])

    def identity(self, index: int) -> str:
        """See ``Feed``."""
        return digest_of(self.batches[index])


def different(batches: Iterable[Batch]) -> list[Batch]:
    """Batches without repetitions: what is held out must not have been fitted."""
    found: dict[str, Batch] = {}
    repeated = 0
    for batch in batches:
        digest = digest_of(batch)
        repeated += digest in found
        found.setdefault(digest, batch)
    if repeated:
        logger.warning("%d of %d batches repeat another one and are left out", repeated, repeated + len(found))
    return list(found.values())


def digest_of(batch: Mapping[str, Any]) -> str:
    """Hex SHA-256 of all that a batch holds."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        for leaf in compat.tree_leaves(batch[name]):
            if isinstance(leaf, Tensor):
                digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(f"{name} {leaf!r}".encode())
    return digest.hexdigest()


class SampleFeed(Feed):
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

    def __getitem__(self, index: int) -> Inputs:
        return inputs_of(self.samples[index], self.processor, self._model)

    def identity(self, index: int) -> str:
        """See ``Feed``."""
        prepared = json.dumps([self.processor.description(), self.processor.method(self._model)], sort_keys=True)
        return f"{self.samples.digests[index]} {prepared}"


def inputs_of(sample: Sample, processor: Processor, model: nn.Module) -> Inputs:
    """What a model is called with for one sample, on its device and in its dtype.

    Raises:
        BadSample: The processor cannot make an input of it.
    """
    parameter = anchor(model)
    towers = processor.towers(model)
    batch = processor.prepare(sample, model)
    return Inputs(
        {key: place(value, parameter) for key, value in batch.items()},
        processor.method(model),
        "+".join(sorted(towers)) if towers is not None else "",
    )


class JoinedFeed(Feed):
    """Several feeds one after another: images for one tower, texts for the other.

    Args:
        feeds: The feeds.
    """

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = feeds
        self._places = [(feed, place) for feed in feeds for place in range(len(feed))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Inputs:
        feed, place = self._places[index]
        return feed[place]

    def identity(self, index: int) -> str:
        """See ``Feed``."""
        feed, place = self._places[index]
        return feed.identity(place)


class FirstOf(JoinedFeed):
    """The first samples of a feed, of each of its parts where it is joined.

    Args:
        feed: The feed.
        count: Number of samples; of each part, where there are several.
    """

    def __init__(self, feed: Feed, count: int) -> None:
        super().__init__(feed.feeds if isinstance(feed, JoinedFeed) else [feed])
        self._count: int = min(count, feed._count) if isinstance(feed, FirstOf) else count
        self._places = [(part, place) for part in self.feeds for place in range(min(len(part), self._count))]


def anchor(model: nn.Module) -> Tensor:
    """A parameter that is in memory: it is on the device, and has the dtype, that a model computes in."""
    return next((each for each in model.parameters() if not each.is_meta), next(model.parameters()))


def place(value: Any, like: Tensor) -> Any:
    """Move a tensor to the device of ``like``, and to its dtype where it is floating point."""
    if not isinstance(value, Tensor):
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else None)
