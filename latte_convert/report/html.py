"""The report as one self-contained HTML page: what a person looks at before shipping a hybrid.

Everything that needs arithmetic (verdict, scales, positions) is computed here; the template only lays out.
Horizontal positions are percentages, so that a drawing fits any width without scaling its text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from latte_convert.report.schema import Report, SiteReport

LOG_SPAN = 100.0
"""Scores that differ by more than this factor (two decades) are drawn on a logarithmic scale."""

SAME_SPEED = 0.03
"""Forward times closer than this share of each other are called equal: a median of few runs shows no less."""

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Verdict:
    """What a mean cosine is called; ``floor`` is the lowest one that still deserves it."""

    floor: float
    span: str
    label: str
    advice: str


VERDICTS = (
    Verdict(0.99, "0.99 and up", "very close", "Still check the task you care about."),
    Verdict(0.95, "0.95 to 0.99", "close", "Check the task you care about before you ship."),
    Verdict(0.85, "0.85 to 0.95", "noticeably different", "Measure your task, or convert fewer sites."),
    Verdict(-math.inf, "below 0.85", "far from the original", "Do not deploy without checking your task."),
)
"""Best first. Rules of thumb for reading a cosine, not a promise about any task."""


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


def write_html(report: Report, path: Path) -> None:
    """Write the page that ``render_html`` makes, UTF-8, the same bytes on every system.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.write_bytes(render_html(report).encode())


def render_html(report: Report) -> str:
    """Render a report as one HTML page without any outside reference.

    Args:
        report: Of a conversion, or of a scoring (``fidelity`` is then None).

    Returns:
        The page; equal reports give equal text.
    """
    fidelity = report.fidelity
    scores = [site.score.value for site in report.sites if site.score and site.score.value is not None]
    scale = sensitivity_scale(scores)
    primary = fidelity.outputs[fidelity.primary].cosine if fidelity else None
    return _template().render(
        report=report,
        # A path is long and says where it was made; its last part names the model. Provenance gives all of it.
        name=PurePath(report.source.id).name if PurePath(report.source.id).is_absolute() else report.source.id,
        kernel=report.recipe.get("kernel", "linear attention"),
        primary=primary,
        verdicts=VERDICTS,
        verdict=None if primary is None else verdict_of(primary),
        worst=_worse_output(report),
        below_min_tokens=_below_min_tokens(report),
        scale=scale,
        bars=sensitivity_bars(report.sites, scale),
        chart=block_chart(report),
        speed=_speed(report),
    )


def verdict_of(cosine: float) -> Verdict:
    """The first verdict whose floor ``cosine`` reaches."""
    return next(verdict for verdict in VERDICTS if cosine >= verdict.floor)


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


def _worse_output(report: Report) -> str | None:
    """The least faithful output, where it deserves a worse verdict than the primary one."""
    if report.fidelity is None:
        return None
    outputs = report.fidelity.outputs
    worst = min(outputs, key=lambda name: outputs[name].cosine)
    primary = verdict_of(outputs[report.fidelity.primary].cosine)
    return worst if verdict_of(outputs[worst].cosine).floor < primary.floor else None


def _below_min_tokens(report: Report) -> int:
    """Converted sites whose held-out inputs were too short for the converted branch to run."""
    least = report.recipe.get("min_tokens") or 0
    tokens = report.cost.tokens if report.cost else {}
    return sum(name in tokens and tokens[name] < least for name in report.converted)


def _speed(report: Report) -> str | None:
    """One honest sentence on the forward time; None where it was not measured."""
    times = report.cost.forward_ms if report.cost else {}
    original, hybrid = times.get("original"), times.get("hybrid")
    if not original or not hybrid:
        return None
    if abs(hybrid - original) <= SAME_SPEED * original:
        return "Original and hybrid took the same time here, within what these runs can tell."
    if hybrid > original:
        return (
            f"The hybrid was {hybrid / original:.2f} times slower here: on this device and at these "
            "input lengths, converting does not pay in speed."
        )
    return f"The hybrid was {original / hybrid:.2f} times faster here."


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals.update(
        cosine=_cosine,
        number=_number,
        flops=_flops,
        size=_size,
        count=_count,
        values=_values,
        setting=_setting,
        dotted=_dotted,
    )
    source = resources.files("latte_convert.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def _dotted(name: str) -> Markup:
    """A module's name, escaped, that a narrow column breaks after its dots."""
    return Markup(".<wbr>").join(escape(part) for part in name.split("."))


def _cosine(value: float) -> str:
    """Rounded down, so that what is shown never looks better than the verdict."""
    return str(Decimal(repr(value)).quantize(Decimal("0.0001"), ROUND_FLOOR))


def _number(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def _flops(value: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}FLOPs"
    return f"{value:,.0f} FLOPs"


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _values(values: Sequence[float]) -> str:
    """The value of a layer, or the range over its heads."""
    if len(values) == 1:
        return _number(values[0])
    return f"{_number(min(values))} to {_number(max(values))} ({len(values)} heads)"


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
