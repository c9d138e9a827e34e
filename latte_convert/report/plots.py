"""The charts of the page as PNG files, for slides and for pages that take no HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from latte_convert.artifact.results import Fill, write_files
from latte_convert.compat import require
from latte_convert.measuring.map_result import AttentionMap
from latte_convert.report.charts import Bars, Chart, block_chart, blocks, frontier_chart, sensitivity_bars
from latte_convert.report.curves import MEASURES, bench_chart
from latte_convert.report.html import plans, template
from latte_convert.report.palette import LIGHT
from latte_convert.report.schema import Report

CURVES = ("speed", "attention-speed", "memory", "attention-memory")
"""Names of the files of ``MEASURES``."""


def plot_paths(report: Report, directory: Path, stem: str = "report") -> list[Path]:
    """The files that ``write_plots`` would write.

    Raises:
        InputError: The library that draws them is not installed.
    """
    require("resvg_py", "plots")
    return [directory / f"{stem}-{name}.png" for name, _ in _figures(report)]


def write_plots(report: Report, directory: Path, stem: str = "report") -> list[Path]:
    """Write every chart that the report has numbers for as ``STEM-CHART.png``; existing files are replaced.

    Args:
        report: The report.
        directory: Where to; it exists.
        stem: What the names begin with.

    Returns:
        The files, in the order of the page.

    Raises:
        InputError: The library that draws them is not installed.
        OutputError: A file cannot be written.
    """
    resvg = require("resvg_py", "plots")
    fills: dict[Path, Fill] = {}
    for name, svg in _figures(report):
        picture = resvg.svg_to_bytes(
            svg_string=svg, zoom=2, background=LIGHT["bg"], image_rendering="optimize_speed", sans_serif_family=_FONT
        )
        fills[directory / f"{stem}-{name}.png"] = partial(Path.write_bytes, data=bytes(picture))
    if fills:
        write_files(fills)
    return list(fills)


_FONT = "DejaVu Sans"


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    """Name and SVG of every figure."""
    bars = sensitivity_bars(report)
    if any(value is not None for _, value in bars.rows):
        yield "sensitivity", _bars(bars)
    charts = {"blocks": block_chart(blocks(report)), "frontier": frontier_chart(plans(report))}
    if report.bench:
        charts |= {name: bench_chart(report.bench, m) for name, m in zip(CURVES, MEASURES, strict=True)}
    for name, chart in charts.items():
        if chart is not None:
            yield name, _chart(chart)
    if report.maps:
        yield "maps", _maps(report.maps)


def _chart(chart: Chart) -> str:
    return _figure(chart.title, 720, 396 + 20 * len(chart.series), chart=chart)


def _bars(bars: Bars) -> str:
    longest = max(len(site.name) for site, _ in bars.rows)
    return _figure("Sensitivity (low is robust)", 450 + 7 * longest, 84 + 20 * len(bars.rows), bars=bars)


def _maps(maps: list[AttentionMap]) -> str:
    return _figure("Attention on one held-out sample", 620, 56 + 330 * len(maps), maps=maps)


def _figure(title: str, width: int, height: int, **drawn: Any) -> str:
    """A figure with the colours of the light page: a file has no custom properties to look up."""
    given = {"chart": None, "bars": None, "maps": None, **drawn}
    svg = template("figure.svg.j2").render(title=title, width=width, height=height, **given)
    return re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], svg.strip())
