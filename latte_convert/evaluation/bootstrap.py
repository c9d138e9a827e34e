"""Retention, and how sure it is: a paired bootstrap over samples.

Efron, "Bootstrap methods: another look at the jackknife" (1979): the percentile interval. Both models are scored on the
same resample, so that what makes a sample hard for both cancels in the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
"""Coverage of the intervals."""

Scorer = Callable[[Sequence[Any]], dict[str, float]]
Interval = tuple[float, float]


def retention(original: float, hybrid: float, *, lower_is_better: bool = False) -> float | None:
    """What the hybrid keeps of the original's quality: ``max(0, hybrid) / original``.

    The quality is the metric itself, or ``1 - metric`` for an error rate: word accuracy for a word error rate.

    Returns:
        1 where nothing is lost, more where the hybrid is better; None where the original's quality is not positive,
        or either is not finite.
    """
    if lower_is_better:
        original, hybrid = 1 - original, 1 - hybrid
    if not (math.isfinite(original) and math.isfinite(hybrid)) or original <= 0:
        return None
    return max(0.0, hybrid) / original


def intervals(
    score: Scorer,
    original: Sequence[Any],
    hybrid: Sequence[Any],
    lower_is_better: dict[str, bool],
    *,
    resamples: int,
    seed: int,
) -> dict[str, Interval | None]:
    """Confidence interval of the retention of every metric.

    Args:
        score: Metrics of some records, by name.
        original: The original's records.
        hybrid: The hybrid's records of the same samples, in the same order.
        lower_is_better: The metrics wanted, and whether each is an error rate.
        resamples: How often to draw as many samples as there are, with replacement.
        seed: Of the draws.

    Returns:
        The 2.5th and 97.5th percentile; None where the retention is undefined on more than half of the resamples.
    """
    generator = np.random.default_rng(seed)
    drawn: dict[str, list[float]] = {name: [] for name in lower_is_better}
    for _ in range(resamples):
        index = generator.integers(len(original), size=len(original))
        before, after = score(_take(original, index)), score(_take(hybrid, index))
        for name, lower in lower_is_better.items():
            value = retention(before.get(name, math.nan), after.get(name, math.nan), lower_is_better=lower)
            if value is not None:
                drawn[name].append(value)
    tail = (1 - CONFIDENCE) / 2
    return {name: _percentiles(values, tail) if len(values) > resamples / 2 else None for name, values in drawn.items()}


def _take(records: Sequence[Any], index: np.ndarray) -> Sequence[Any]:
    if isinstance(records, np.ndarray):
        taken: Sequence[Any] = records[index]
        return taken
    return [records[i] for i in index]


def _percentiles(values: list[float], tail: float) -> Interval:
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)
