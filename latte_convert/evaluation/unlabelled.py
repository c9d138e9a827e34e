"""Samples without labels, read as calibration reads them: for tasks whose reference is the original itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from latte_convert.data.decode import Value
from latte_convert.data.examples import Example
from latte_convert.data.samples import Modality, SampleSet, open_samples
from latte_convert.errors import DataError, UsageError
from latte_convert.evaluation.tasks.base import Setting

SAMPLES = 128
"""How many are read where no number is given."""


def open_unlabelled(setting: Setting, modalities: Sequence[Modality]) -> list[SampleSet]:
    """The samples of each place, each of the first modality left that it has.

    Raises:
        UsageError: More places than modalities.
        DataError: A place has no usable sample.
    """
    left = list(modalities)
    if len(setting.data) > len(left):
        raise UsageError(f"{setting.source.model_class} takes {' and '.join(left)} here: give one --data for each.")
    opened = []
    for place in setting.data:
        samples = _open(place, setting, left)
        left.remove(samples.modality)
        opened.append(samples)
    return opened


def _open(place: str, setting: Setting, modalities: Sequence[Modality]) -> SampleSet:
    failure: DataError | None = None
    for modality in modalities:
        try:
            return open_samples(
                place, modality, samples=setting.samples or SAMPLES, seed=setting.seed,
                sampling_rate=setting.processor(modality).sampling_rate,
            )  # fmt: skip
        except DataError as error:  # noqa: PERF203
            failure = failure or error
    raise failure or DataError(f"{place} has no usable sample.")


def examples_of(opened: Sequence[SampleSet]) -> list[Example]:
    """An example for every sample."""
    return [
        Example(name, samples.modality, partial(_value, samples, i))
        for samples in opened
        for i, name in enumerate(samples.ids)
    ]


def _value(samples: SampleSet, index: int) -> Value:
    return samples[index].value
