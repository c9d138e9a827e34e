"""What an exported file computes, beside what PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from latte_convert.exporting.formats import Run
from latte_convert.exporting.parts import Part

BATCHES = (1, 3)
TOLERANCE = 1e-3
"""Largest difference, relative to the root mean square of an output, that needs no explanation."""
ROUNDINGS = (1e-6, -1e-6, 2e-6)
"""Relative changes of the inputs, of the size of rounding in float32."""
MOST_ROUNDINGS = 2.0
"""A file that is further from PyTorch than ``TOLERANCE`` may be as far as this many times what rounding does to it."""


@dataclass(frozen=True)
class Difference:
    """The difference of one output, relative to the root of its mean square.

    Attributes:
        output: Its name.
        batch: Batch size.
        size: Size of the inputs, such as ``518x518`` or ``128``.
        value: The largest difference; infinity where shapes differ or an output is not finite.
        mean: The root of the mean square of the differences.
        rounding: What ``mean`` is between two runs of PyTorch whose inputs are rounded differently, the largest of some
            tries; None where it was not looked at. A hybrid that chooses which tokens go together chooses otherwise
            where two are as good, and then differs from itself.
    """

    output: str
    batch: int
    size: str
    value: float
    mean: float
    rounding: float | None = None

    @property
    def close(self) -> bool:
        """Whether the file is as close to PyTorch as ``TOLERANCE``, or as PyTorch is to itself."""
        own = self.rounding is not None and self.mean <= MOST_ROUNDINGS * self.rounding
        return self.value <= TOLERANCE or own

    def __str__(self) -> str:
        """In words."""
        text = (
            f"{self.value:.1e} of the root mean square of {self.output} (batch {self.batch}, size {self.size}), "
            f"{self.mean:.1e} in the mean"
        )
        if self.rounding is None:
            return text
        return f"{text}; PyTorch differs from itself by {self.rounding:.1e} where its inputs are rounded otherwise"


@torch.no_grad()
def differences(part: Part, run: Run) -> list[Difference]:
    """Compare a file with the model in memory at several batch sizes and sizes; texts are padded.

    What rounding does to PyTorch is looked at where an output is further off than ``TOLERANCE``.
    """
    found = []
    for size in part.inputs.sizes():
        for batch in BATCHES:
            inputs = part.inputs.make(batch, size)
            ours, theirs = part(**inputs), run(inputs)
            label = "x".join(map(str, size))
            pairs = list(zip(map(_largest, ours, theirs), map(_mean, ours, theirs), strict=True))
            roundings: list[float | None] = [None] * len(pairs)
            if any(not value <= TOLERANCE for value, _ in pairs):
                roundings = _roundings(part, inputs, ours)
            found += [
                Difference(name, batch, label, value, mean, rounding)
                for name, (value, mean), rounding in zip(part.outputs, pairs, roundings, strict=True)
            ]
    return found


def _roundings(part: Part, inputs: dict[str, Tensor], ours: tuple[Tensor, ...]) -> list[float | None]:
    """What each output differs by where inputs are rounded differently; None where they are not numbers that are."""
    if not any(value.is_floating_point() for value in inputs.values()):
        return [None] * len(ours)
    others = [
        part(**{name: x * (1 + change) if x.is_floating_point() else x for name, x in inputs.items()})
        for change in ROUNDINGS
    ]
    return [
        max(map(_mean, [own] * len(others), same)) for own, same in zip(ours, zip(*others, strict=True), strict=True)
    ]


def _largest(expected: Tensor, actual: Tensor) -> float:
    """Largest difference over the root of the mean square."""
    return _relative(expected, actual, lambda difference: difference.abs().max())


def _mean(expected: Tensor, actual: Tensor) -> float:
    """Root of the mean square of the differences over that of the values."""
    return _relative(expected, actual, lambda difference: difference.square().mean().sqrt())


def _relative(expected: Tensor, actual: Tensor, norm: Callable[[Tensor], Tensor]) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    expected, actual = expected.double(), actual.double()
    scale = expected.square().mean().sqrt().clamp_min(1e-12)
    worst = float(norm(actual - expected) / scale)
    return worst if worst == worst else float("inf")
