"""Where things go in the sensitivity and the fidelity chart.

Horizontal positions are percentages, so that a drawing fits any width without scaling its text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from latte_convert.report.schema import Report, SiteReport

LOG_SPAN = 100.0
"""Scores that differ by more than this factor (two decades) are drawn on a logarithmic scale."""

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis; ``at`` in percent (horizontal) or in user units (vertical)."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """From a score to a bar's length in percent."""

    log: bool
    low: float
    high: float
    ticks: tuple[Tick, ...]

    def position(self, value: float) -> float:
        """Length of the bar of ``value``; a score that a log scale cannot hold has none."""
        if not self.log:
            share = value / self.high
        elif value <= 0:
            share = 0.0
        else:
            share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(100 * min(max(share, 0.0), 1.0), 2)


@dataclass(frozen=True)
class Bar:
    """One site in the sensitivity chart; ``length`` in percent, None where there is no finite score."""

    site: SiteReport
    value: float | None
    length: float | None


@dataclass(frozen=True)
class Point:
    """One block of the fidelity chart: ``x`` in percent, ``y`` in percent of the height, from the top."""

    number: int
    name: str
    x: float
    y: float
    converted: bool


@dataclass(frozen=True)
class BlockChart:
    """Cosine of every block against its position."""

    points: tuple[Point, ...]
    low: str
    ticks: tuple[Tick, ...]
    numbered: tuple[Point, ...]


def sensitivity_scale(values: Sequence[float]) -> Scale:
    """A scale that holds every value: from zero, or logarithmic where the range spans over two decades."""
    positive = [value for value in values if value > 0]
    if not positive:
        return Scale(False, 0.0, 1.0, (Tick(0.0, "0"), Tick(100.0, "1")))
    if max(positive) / min(positive) > LOG_SPAN:
        return _log_scale(min(positive), max(positive))
    step = 10 ** math.floor(math.log10(max(positive)))
    step = next(step * factor for factor in (0.2, 0.25, 0.5, 1, 2, 2.5) if max(positive) <= 5 * step * factor)
    count = math.ceil(max(positive) / step)
    ticks = tuple(Tick(round(100 * i / count, 2), f"{i * step:.3g}") for i in range(count + 1))
    return Scale(False, 0.0, count * step, ticks)


def _log_scale(smallest: float, largest: float) -> Scale:
    # Starts below the smallest value, not at it, so that no bar vanishes.
    low, high = math.ceil(math.log10(smallest)) - 1, math.ceil(math.log10(largest))
    stride = math.ceil((high - low) / 6)
    ticks = tuple(
        Tick(round(100 * (power - low) / (high - low), 2), f"10{str(power).translate(_SUPERSCRIPT)}")
        for power in range(low, high + 1, stride)
    )
    return Scale(True, low, high, ticks)


def sensitivity_bars(sites: Sequence[SiteReport], scale: Scale) -> list[Bar]:
    """A bar for every eligible site, in order of the module tree."""
    bars = []
    for site in sites:
        if site.eligible:
            value = site.score.value if site.score else None
            bars.append(Bar(site, value, None if value is None else scale.position(value)))
    return bars


def block_chart(report: Report) -> BlockChart | None:
    """Where each block's cosine goes, on an axis that ends at 1 and starts at a round number below all."""
    if report.fidelity is None or not report.fidelity.blocks:
        return None
    cosines = {name: agreement.cosine for name, agreement in report.fidelity.blocks.items()}
    lost = max(1 - min(cosines.values()), 0.0)
    span = next((s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if lost <= s), 2.0)
    points = tuple(
        Point(
            number=i + 1,
            name=name,
            x=round(100 * (i + 0.5) / len(cosines), 2),
            y=round(100 * min(max((1 - cosine) / span, 0.0), 1.0), 2),
            converted=any(site == name or site.startswith(f"{name}.") for site in report.converted),
        )
        for i, (name, cosine) in enumerate(cosines.items())
    )
    ticks = tuple(Tick(100 * share, f"{1 - span * share:.4g}") for share in (0.0, 0.5, 1.0))
    return BlockChart(points, ticks[-1].label, ticks, points[:: math.ceil(len(points) / 12)])
