"""The report as one self-contained HTML page: what a person looks at before shipping a hybrid.

Everything that needs arithmetic (verdict, scales, positions) is computed in Python; the templates only lay out.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import TypeVar

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from latte_convert.report import text
from latte_convert.report.axes import MARKS
from latte_convert.report.charts import block_chart, sensitivity_bars, sensitivity_scale
from latte_convert.report.compare import flops_share
from latte_convert.report.curves import VARIANTS, bench_charts, comparison_chart, frontier_chart
from latte_convert.report.schema import AttentionMap, Heatmap, Report

_T = TypeVar("_T")

SAME_SPEED = 0.03
"""Forward times closer than this share of each other are called equal: a median of few runs shows no less."""

FEW_SAMPLES = 16
"""Below so many held-out samples the page warns that their mean may be off."""

SCORERS = {
    "paper": "How far each block\u2019s output moves when every site is converted",
    "isolated": "How far the final output moves when a site is the only one that is converted",
    "greedy": "How far the final output moves when a site is converted behind those that were chosen before it",
}
"""What the sensitivity of a site means, by the recipe's scorer."""

RAMP = ((0xFB, 0xF5, 0xEA), (0xE2, 0xA3, 0x65), (0x8C, 0x4A, 0x12), (0x24, 0x11, 0x02))
"""Colours of a map, from no attention to its peak: lightness falls all the way, so it also reads without colour."""


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
    return _template("report.html.j2").render(
        report=report,
        name=model_name(report),
        kernels=kernel_counts(report),
        primary=primary,
        verdicts=VERDICTS,
        verdict=None if primary is None else verdict_of(primary),
        worst=_worse_output(report),
        few_samples=FEW_SAMPLES,
        below_min_tokens=_below_min_tokens(report),
        scorer=SCORERS.get(str(report.recipe.get("scorer")), "How far outputs move when sites are converted"),
        several_kernels="," in kernel_counts(report),
        scale=scale,
        bars=sensitivity_bars(report.sites, scale),
        chart=block_chart(report),
        frontier=frontier_chart(report.frontier or ()),
        curves=bench_charts(report.bench),
        speed=_speed(report),
    )


def render_comparison(reports: Mapping[str, Report]) -> str:
    """Render several reports side by side as one HTML page without any outside reference.

    Args:
        reports: At least two, by the name that heads their column.

    Returns:
        The page; equal reports give equal text.
    """
    return _template("compare.html.j2").render(
        reports=reports,
        outputs=_union(report.fidelity.outputs if report.fidelity else () for report in reports.values()),
        sites=_union((site.name for site in report.sites) for report in reports.values()),
        evaluations=_union(
            ((each.task, tuple(each.data), metric) for each in report.evaluations or () for metric in each.metrics)
            for report in reports.values()
        ),
        chart=comparison_chart(reports),
        model_name=model_name,
        kernel_counts=kernel_counts,
        verdict_of=verdict_of,
        flops_share=flops_share,
    )


def _union(groups: Iterable[Iterable[_T]]) -> list[_T]:
    """Everything that any group holds, once, in order of first appearance."""
    return list(dict.fromkeys(item for group in groups for item in group))


def verdict_of(cosine: float) -> Verdict:
    """The first verdict whose floor ``cosine`` reaches."""
    return next(verdict for verdict in VERDICTS if cosine >= verdict.floor)


def model_name(report: Report) -> str:
    """What the page calls the model; of a path, which is long and says where it was made, only the last part."""
    path = PurePath(report.source.id)
    return path.name if path.is_absolute() else report.source.id


def kernel_counts(report: Report) -> str:
    """The kernels of the converted sites, the most frequent first: ``near_far``, or ``5 near_far, 3 latte``."""
    counts = Counter(site.fit.kernel for site in report.sites if site.converted and site.fit)
    if len(counts) > 1:
        return ", ".join(f"{number} {name}" for name, number in counts.most_common())
    return next(iter(counts), "linear attention")


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


def heatmap_uri(map_: AttentionMap, heatmap: Heatmap) -> str:
    """A map as a PNG of one pixel per cell, in a ``data:`` address."""
    from PIL import Image

    rows, columns = map_.shape
    image = Image.frombytes("P", (columns, rows), base64.b64decode(heatmap.levels))
    image.putpalette([channel for level in range(256) for channel in ramp(level / 255)])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def ramp(share: float) -> tuple[int, int, int]:
    """The colour at ``share`` (0 to 1) of the way along ``RAMP``."""
    at = share * (len(RAMP) - 1)
    index = min(int(at), len(RAMP) - 2)
    low, high = RAMP[index], RAMP[index + 1]
    red, green, blue = (round(a + (b - a) * (at - index)) for a, b in zip(low, high, strict=True))
    return red, green, blue


@cache
def _template(name: str) -> Template:
    def load(name: str) -> str:
        return resources.files("latte_convert.report").joinpath(name).read_text(encoding="utf-8")

    environment = Environment(loader=FunctionLoader(load), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals.update(
        cosine=text.cosine,
        number=text.number,
        percent=text.percent,
        flops=text.flops,
        size=text.size,
        count=text.count,
        values=text.values,
        setting=text.setting,
        options=text.options,
        dotted=text.dotted,
        heatmap_uri=heatmap_uri,
        marks=MARKS,
        variants=VARIANTS,
        ramp=[f"rgb{colour}" for colour in RAMP],
    )
    return environment.get_template(name)
