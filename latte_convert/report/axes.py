"""Axes of the charts: from a value to a percentage of the plot, so that a drawing fits any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

IDENTICAL = 1e-7
"""Outputs whose 1 - cosine is below this differ by float32 rounding only: an axis of cosines ends there."""

DECADES = 100.0
"""Bars whose lengths differ by more than this factor are drawn on a logarithmic axis."""

_STEPS = tuple(factor * 10.0**power for power in range(-9, 16) for factor in (1, 2, 5))
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Tick:
    """A labelled value of an axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A range of values, the scale it is drawn on, and its ticks."""

    name: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    scale: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Where a value lies, in percent from the low end; values outside lie on the edge."""
        low, high = self.scale(self.low), self.scale(self.high)
        return round(100 * min(max((self.scale(value) - low) / (high - low), 0.0), 1.0), 2)

    def down(self, value: float) -> float:
        """Where a value lies, in percent from the high end: y of a drawing points down."""
        return round(100 - self.at(value), 2)


def log(value: float) -> float:
    """The logarithmic scale; zero lies below everything else."""
    return math.log10(max(value, 1e-300))


def nines(cosine: float, top: float = IDENTICAL) -> float:
    """The scale of cosines: logarithmic in 1 - cosine, so that 0.999 and 0.9999 are as far apart as 0.9 and 0.99."""
    return -math.log10(max(1 - cosine, top))


def linear_axis(name: str, low: float, high: float, label: Callable[[float], str] = "{:.4g}".format) -> Axis:
    """A linear axis around a range, with at most seven ticks on round numbers."""
    span = max(high - low, 1e-9 * max(abs(high), 1.0))
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * f for f in (0.2, 0.25, 0.5, 1, 2, 2.5, 5) if span <= 5 * power * f)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = (i * step for i in range(first, last + 1))
    return Axis(name, first * step, last * step, tuple(Tick(tick, label(tick)) for tick in ticks))


def log_axis(name: str, low: float, high: float, label: Callable[[float], str] = "{:,.6g}".format) -> Axis:
    """A logarithmic axis around a positive range, from and to 1, 2 or 5 times a power of ten; at most six ticks."""
    steps = _steps(low, high)
    return Axis(name, steps[0], steps[-1], tuple(Tick(step, label(step)) for step in _thinned(steps)), log)


def cosine_axis(name: str, cosines: Sequence[float]) -> Axis:
    """An axis of cosines on the scale ``nines``; it ends at 1 where a cosine is that close to it."""
    losses = [1 - cosine for cosine in cosines]
    real = [loss for loss in losses if loss > IDENTICAL] or [10 * IDENTICAL]
    steps = [step for step in _steps(min(real), max(*real, 5 * IDENTICAL)) if step > IDENTICAL]
    ticks = [Tick(1 - step, f"{1 - step:.9g}") for step in _thinned(steps)]
    top = steps[0]
    if min(losses, default=1.0) <= IDENTICAL:
        top = max(steps[0] / 10, IDENTICAL)
        ticks.append(Tick(1 - top, "1"))
    return Axis(name, 1 - steps[-1], 1 - top, tuple(ticks), partial(nines, top=top))


def ratio_axis(name: str, ratios: Iterable[float]) -> Axis:
    """An axis of ratios to the original that holds 1; logarithmic where they differ by more than a factor of four."""
    values = [1.0, *ratios]
    low, high = min(values), max(values)
    if high / low > 4:
        return log_axis(name, low, high, "{:.3g}x".format)
    return linear_axis(name, low, high, "{:.3g}x".format)


def bar_axis(name: str, values: Sequence[float]) -> Axis:
    """An axis for lengths of bars: from zero, or logarithmic where they span over two decades."""
    positive = [value for value in values if value > 0]
    if not positive:
        return Axis(name, 0.0, 1.0, (Tick(0.0, "0"), Tick(1.0, "1")))
    if max(positive) / min(positive) <= DECADES:
        return linear_axis(name, 0.0, max(positive), "{:.3g}".format)
    # Starts below the smallest value, not at it, so that every bar can be seen.
    low, high = math.ceil(math.log10(min(positive))) - 1, math.ceil(math.log10(max(positive)))
    stride = math.ceil((high - low) / 6)
    ticks = (Tick(10.0**power, f"10{str(power).translate(_SUPERSCRIPT)}") for power in range(low, high + 1, stride))
    return Axis(name, 10.0**low, 10.0**high, tuple(ticks), log)


def number_axis(name: str, count: int) -> Axis:
    """An axis of the numbers 1 to ``count`` with half a step of room at either end; at most twelve are labelled."""
    ticks = (Tick(number, str(number)) for number in range(1, count + 1, math.ceil(count / 12)))
    return Axis(name, 0.5, count + 0.5, tuple(ticks))


def length_axis(name: str, lengths: Iterable[int]) -> Axis:
    """A logarithmic axis of sequence lengths; ticks are lengths that were measured, at most five of them."""
    known = sorted(set(lengths))
    low, high = known[0], max(known[-1], known[0] + 1)
    gap = 0.2 * math.log(high / low)
    kept = [low]
    for length in known[1:-1]:
        if math.log(length / kept[-1]) >= gap and math.log(high / length) >= gap:
            kept.append(length)
    if len(known) > 1:
        kept.append(high)
    return Axis(name, low, high, tuple(Tick(length, f"{length:,}") for length in kept), log)


def _steps(low: float, high: float) -> list[float]:
    """The steps from the last one that is not above ``low`` to the first one that is not below ``high``."""
    first = max((i for i, step in enumerate(_STEPS) if step <= low * (1 + 1e-9)), default=0)
    last = min((i for i, step in enumerate(_STEPS) if step >= high * (1 - 1e-9)), default=len(_STEPS) - 1)
    return list(_STEPS[first : max(last, first + 1) + 1])


def _thinned(steps: Sequence[float]) -> Sequence[float]:
    """At most six of the steps, evenly apart."""
    return steps[:: math.ceil((len(steps) - 1) / 5)]
