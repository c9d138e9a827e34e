"""What of a report stands in the model card of its artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from latte_convert.artifact.card import Measured
from latte_convert.report.schema import Report


def measured(report: Report) -> list[Measured]:
    """The fidelity on held-out samples, and every evaluation."""
    return [*_fidelity(report), *_evaluations(report)]


def _fidelity(report: Report) -> Iterator[Measured]:
    if report.fidelity is not None:
        for name, found in report.fidelity.outputs.items():
            yield Measured(
                "fidelity", f"cosine of {name}", found.cosine, None, found.interval, "likeness", "held out of "
                "calibration", report.fidelity.samples,
            )  # fmt: skip


def _evaluations(report: Report) -> Iterator[Measured]:
    for evaluation in report.evaluations or ():
        data = ", ".join(Path(place).name for place in evaluation.data)
        for name, found in evaluation.metrics.items():
            yield Measured(
                evaluation.task, name, found.hybrid, found.original, found.interval, "retention", data,
                evaluation.samples,
            )  # fmt: skip
