"""Run original and hybrid side by side: every input is prepared once, and both models see the same batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from latte_convert import processes
from latte_convert.data.decode import BadSample
from latte_convert.data.examples import Example
from latte_convert.data.feed import Inputs, place
from latte_convert.errors import CheckpointError, DataError, GateError, InputError, LatteError, first_line, is_shortage
from latte_convert.evaluation.result import SkippedReport
from latte_convert.evaluation.tasks.base import Task
from latte_convert.progress import Progress
from latte_convert.wording import some

if TYPE_CHECKING:
    from latte_convert.artifact.load import Artifact

_Group = list[tuple[Example, Inputs]]


@dataclass
class Predictions:
    """What both models made of the examples.

    Attributes:
        examples: Those that were run, in the order of the predictions.
        original: The original's prediction for each.
        hybrid: The hybrid's.
        skipped: Examples that could not be decoded.
        calls: How often each converted site ran.
        exact_calls: How often it ran softmax after all.
        failure: Why the original did not run on the latest example that it refused.
    """

    examples: list[Example] = field(default_factory=list)
    original: list[Any] = field(default_factory=list)
    hybrid: list[Any] = field(default_factory=list)
    skipped: list[SkippedReport] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    exact_calls: Counter[str] = field(default_factory=Counter)
    failure: Exception | None = None


def run_both(task: Task, artifact: Artifact, batch_size: int, progress: Progress) -> Predictions:
    """Run original and hybrid over all examples, batch by batch.

    Args:
        task: Opened.
        artifact: Its model is left as it was.
        batch_size: Inputs in one call of a model; just inputs of equal shape are stacked, so padding never enters.
        progress: Told of every input.

    Raises:
        DataError: No example could be decoded.
        InputError: The task runs none of the converted sites.
        CheckpointError: The original's output is not finite.
        GateError: The hybrid's output is not finite.
    """
    done = Predictions()
    windows = [task.examples[start : start + batch_size] for start in range(0, len(task.examples), batch_size)]
    mine = range(processes.rank(), len(windows), processes.size())
    advance = progress("Running original and hybrid", sum(len(windows[number]) for number in mine))
    parts = {}
    for number in mine:
        part = _run_window(task, artifact, windows[number])
        done.failure = part.failure or done.failure
        # What loads an example need not be data: the others know it by its place.
        places = [place for each in part.examples for place, one in enumerate(windows[number]) if one is each]
        parts[number] = places, replace(part, examples=[], failure=None)
        for _ in windows[number]:
            advance()
    found = {number: part for others in processes.exchange(parts, "predictions") for number, part in others.items()}
    for number, window in enumerate(windows):
        places, part = found[number]
        done.examples += [window[place] for place in places]
        done.original += part.original
        done.hybrid += part.hybrid
        done.skipped += part.skipped
        done.calls += part.calls
        done.exact_calls += part.exact_calls
    task.setting.share_truncated()
    if not done.examples:
        first = some((f"{item.id}: {item.reason}" for item in done.skipped), separator="; ")
        raise DataError(
            f"{', '.join(task.setting.data)}: 0 usable samples, {len(done.skipped)} skipped ({first})."
        ) from (done.failure)
    if artifact.kernels and not done.calls.total():
        raise InputError(
            f"task '{task.name}' runs none of the converted sites ({some(artifact.kernels)}): original and hybrid "
            "would be the same. Choose a task for the converted tower, or convert another one."
        )
    return done


def _run_window(task: Task, artifact: Artifact, window: Sequence[Example]) -> Predictions:
    """Run original and hybrid over some examples."""
    part = Predictions()
    for group in _groups(task, artifact.model, window, part):
        for examples, original, hybrid in _outcomes(task, artifact, group, part):
            part.examples += examples
            part.original += original
            part.hybrid += hybrid
    return part


def _outcomes(
    task: Task, artifact: Artifact, group: _Group, done: Predictions
) -> Iterator[tuple[list[Example], Sequence[Any], Sequence[Any]]]:
    """Both models' predictions for a batch; where the original does not run on it, for each example it does run on."""
    examples = [example for example, _ in group]
    inputs = _stack([inputs for _, inputs in group], next(artifact.model.parameters()))
    with torch.no_grad():
        try:
            original = task.predict(artifact.model, inputs, examples)
        except Exception as error:  # whatever a model's forward runs into
            if isinstance(error, LatteError) or is_shortage(error):
                raise
            if len(group) > 1:
                for one in group:
                    yield from _outcomes(task, artifact, [one], done)
            else:
                done.failure = error
                reason = f"{type(artifact.model).__name__} does not run on it: {first_line(error)}"
                done.skipped.append(SkippedReport(id=examples[0].id, reason=reason))
            return
        with artifact.convert() as applied:
            hybrid = task.predict(artifact.model, inputs, examples)
    for name, handler in applied.handlers.items():
        done.calls[name] += handler.calls
        done.exact_calls[name] += handler.exact_calls
    if broken := _not_finite(original, examples):
        raise CheckpointError(
            f"the original's own output is not finite on {broken}: its weights hold NaN, or overflow."
        )
    if broken := _not_finite(hybrid, examples):
        raise GateError(f"the hybrid's output is not finite on {broken}. Convert fewer sites, or in float32.")
    yield examples, *task.compare(original, hybrid)


def _groups(task: Task, model: nn.Module, window: Sequence[Example], done: Predictions) -> Iterator[_Group]:
    """Examples and their inputs, those of equal shape together; damaged samples are noted and passed over."""
    groups: dict[Any, _Group] = {}
    for example in window:
        try:
            inputs = task.prepare(example, example.load(), model)
        except BadSample as error:
            done.skipped.append(SkippedReport(id=example.id, reason=str(error)))
            continue
        groups.setdefault(_shape(inputs), []).append((example, inputs))
    yield from groups.values()


def _shape(inputs: Inputs) -> Any:
    """What two inputs must share to run as one batch."""
    parts = ((k, tuple(v.shape) if isinstance(v, Tensor) else repr(v)) for k, v in sorted(inputs.kwargs.items()))
    return inputs.method, tuple(parts)


def _stack(group: Sequence[Inputs], like: Tensor) -> Inputs:
    first = group[0]
    kwargs = {
        key: place(torch.cat([inputs.kwargs[key] for inputs in group]) if isinstance(value, Tensor) else value, like)
        for key, value in first.kwargs.items()
    }
    return Inputs(kwargs, first.method, first.tower)


def _not_finite(predictions: Sequence[Any], examples: Sequence[Example]) -> str | None:
    """The first example whose prediction holds a number that is not finite."""
    pairs = zip(predictions, examples, strict=True)
    return next((example.id for prediction, example in pairs if not _finite(prediction)), None)


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)
