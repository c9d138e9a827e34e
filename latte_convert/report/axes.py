"""Charts over two numbers: axes, points and series, laid out.

Positions are percentages of the plot, y from the top. Series differ by colour, by mark and by dash.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from latte_convert.report.charts import Tick

MARKS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5l4.8,8.4h-9.6z",
    "M0,-5.2l5.2,5.2l-5.2,5.2l-5.2,-5.2z",
    "M0,4.9l4.8,-8.4h-9.6z",
)
"""SVG paths around (0, 0): circle, square, triangle, diamond, inverted triangle. Series take them in turn."""


@dataclass(frozen=True)
class Dot:
    """A point; ``solid`` marks are filled, ``ringed`` ones stand out."""

    x: float
    y: float
    label: str
    solid: bool = True
    ringed: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one kind; ``style`` picks colour, mark and dash."""

    label: str
    style: int
    dots: tuple[Dot, ...]
    line: bool


@dataclass(frozen=True)
class Chart:
    """A chart, laid out; ``summary`` says in words what it shows, for those who do not see it."""

    title: str
    summary: str
    x_name: str
    y_name: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    rules: tuple[Tick, ...] = ()
    front: str = ""


@dataclass(frozen=True)
class Axis:
    """From a value to a percentage; ``ticks`` are values."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where a value lies, in percent from the low end."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(value) if self.log else value
        return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)

    def down(self, value: float) -> float:
        """Where a value lies, in percent from the high end: y of a drawing points down."""
        return round(100 - self.at(value), 2)


def linear_axis(low: float, high: float) -> Axis:
    """A linear axis around a range, with at most seven ticks on round numbers."""
    span = max(high - low, 1e-9 * max(abs(high), 1.0))
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * f for f in (0.2, 0.25, 0.5, 1, 2, 2.5, 5) if span <= 5 * power * f)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return Axis(first * step, last * step, False, tuple(i * step for i in range(first, last + 1)))


def log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis around a positive range, from and to 1, 2 or 5 times a power of ten; at most six ticks."""
    steps = [factor * 10.0**power for power in range(-9, 16) for factor in (1, 2, 5)]
    first = max((i for i, step in enumerate(steps) if step <= low * (1 + 1e-9)), default=0)
    last = min((i for i, step in enumerate(steps) if step >= high * (1 - 1e-9)), default=len(steps) - 1)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 5)
    return Axis(steps[first], steps[last], True, tuple(steps[first : last + 1 : stride]))
