"""What a task is: labelled examples, what the model makes of one, and the metric of many.

A task never sees which of the two models it runs: the loop in ``evaluation.evaluate`` prepares every example once and
calls ``predict`` for the original and for the hybrid on the same batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from latte_convert import processes
from latte_convert.data.decode import Value
from latte_convert.data.examples import Example
from latte_convert.data.feed import Inputs
from latte_convert.data.samples import Modality, Sample
from latte_convert.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.data.processor import Processor


@dataclass(frozen=True)
class Metric:
    """A metric of a task.

    Attributes:
        name: The field's name for it, in lower case.
        lower_is_better: Whether it is an error rate: its retention is that of ``1 - value``.
    """

    name: str
    lower_is_better: bool = False


@dataclass
class Setting:
    """What an evaluation was asked to do.

    Attributes:
        source: The checkpoint inside the artifact: modalities, class, directory, processors.
        data: Where the data is, as the user wrote it; one place at least.
        resolution: Image size that the artifact was converted for, or None for the checkpoint's own.
        samples: How many samples at most; None for all.
        seed: Chooses among them, and seeds the bootstrap.
        templates: File of prompt templates, one a line with ``{}``, or None.
        decoder: ONNX file that turns patch features into a map, or None.
    """

    source: Checkpoint
    data: tuple[str, ...]
    resolution: int | None = None
    samples: int | None = None
    seed: int = 0
    templates: Path | None = None
    decoder: Path | None = None
    _processors: dict[Modality, Processor] = field(default_factory=dict, repr=False)

    def processor(self, modality: Modality) -> Processor:
        """The checkpoint's own preprocessing, loaded once."""
        if modality not in self._processors:
            self._processors[modality] = self.source.processor_at(modality, self.resolution)
        return self._processors[modality]

    @property
    def place(self) -> Path:
        """The one local file or folder of a task that reads just one.

        Raises:
            UsageError: Several were given.
            DataError: It is not there.
        """
        from latte_convert.data.sources import missing_path

        if len(self.data) != 1:
            raise UsageError(f"this task reads one --data, not {len(self.data)}.")
        path = Path(self.data[0]).expanduser()
        if not path.exists():
            raise missing_path(str(path))
        return path

    def share_truncated(self) -> None:
        """Learn which samples other processes have found longer than the model takes."""
        mine = {modality: processor.truncated for modality, processor in self._processors.items()}
        for others in processes.exchange(mine, "truncated samples"):
            for modality, found in others.items():
                self.processor(modality).truncated |= found

    @property
    def truncated(self) -> int:
        """Samples so far that were longer than the model takes."""
        return sum(len(processor.truncated) for processor in self._processors.values())


class Task(ABC):
    """One task. The constructor opens the data and checks all of it but the pixels, before any weight is read.

    Attributes:
        name: What ``--task`` calls it.
        metrics: Its metrics, the main one first. A task may return others, named ``METRIC@PART``, beside them.
        resamples: Of the bootstrap; fewer for a metric that is slow.
        note: How to read the result, where that is not obvious; empty otherwise.
        examples: All inputs of the model, in the order they are run.

    Raises:
        DataError: The data or its labels cannot be used; the message names file and line.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    resamples: ClassVar[int] = 1000
    note: ClassVar[str] = ""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.examples: Sequence[Example] = self.open()

    @staticmethod
    @abstractmethod
    def fits(source: Checkpoint) -> str | None:
        """Why a model cannot do this task, from its configuration alone; None where it can."""

    @abstractmethod
    def open(self) -> Sequence[Example]:
        """Find the examples and check every label."""

    def prepare(self, example: Example, value: Value, model: nn.Module) -> Inputs:
        """Inputs of the model for one example, batch size 1, on the CPU; by default its own processor's."""
        processor = self.setting.processor(example.modality)
        return Inputs(processor.prepare(Sample(example.id, "", value), model), processor.method(model))

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> Sequence[Any]:
        """What a model makes of a batch: one small result an example, on the CPU (arrays, text, boxes).

        Args:
            model: The original or the hybrid, on its device.
            inputs: Stacked inputs of equal shape, batch size ``len(examples)``, on the model's device.
            examples: What they are of.
        """

    def compare(self, original: Sequence[Any], hybrid: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Reduce the two models' predictions for a batch against each other; by default they stay as they are."""
        return original, hybrid

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Sequence[Any]:
        """What each sample says about one model: the units that the bootstrap draws; the predictions by default.

        Called once with all predictions of the original and once with the hybrid's, after the last batch, so that
        galleries, class prompts and probes can be built here. The same number in the same order for both.

        Args:
            examples: Those that were run, without the skipped ones.
            predictions: One for each.
        """
        return predictions

    @abstractmethod
    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Metrics of some records, by name; the bootstrap calls it on resamples. NaN where one is undefined."""


def require_two(count: int, what: str) -> None:
    """Refuse a set of one: it has no spread, and most metrics are undefined on it.

    Raises:
        DataError: Fewer than two.
    """
    if count < 2:
        raise DataError(f"{what}: {count} usable sample{'s' * (count != 1)}; a metric needs at least 2. Add samples.")
