"""What an exported file computes, beside what PyTorch does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from latte_convert.exporting.formats import Run
from latte_convert.exporting.parts import Part

BATCHES = (1, 3)


@dataclass(frozen=True)
class Difference:
    """The largest difference of one output, relative to the root of its mean square.

    Attributes:
        output: Its name.
        batch: Batch size.
        size: Size of the inputs, such as ``518x518`` or ``128``.
        value: The difference; infinity where shapes differ or an output is not finite.
    """

    output: str
    batch: int
    size: str
    value: float


@torch.no_grad()
def differences(part: Part, run: Run) -> list[Difference]:
    """Compare a file with the model in memory at several batch sizes and sizes; texts are padded."""
    found = []
    for size in part.inputs.sizes():
        for batch in BATCHES:
            inputs = part.inputs.make(batch, size)
            pairs = zip(part.outputs, part(**inputs), run(inputs), strict=True)
            label = "x".join(map(str, size))
            found += [Difference(name, batch, label, _difference(ours, theirs)) for name, ours, theirs in pairs]
    return found


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    expected, actual = expected.double(), actual.double()
    scale = expected.square().mean().sqrt().clamp_min(1e-12)
    worst = float((actual - expected).abs().max() / scale)
    return worst if worst == worst else float("inf")
