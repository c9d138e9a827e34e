"""The report as one self-contained HTML page: what a person looks at before shipping a hybrid.

Everything that needs arithmetic (verdict, scales, positions) is computed in Python; the templates only lay out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, TypeVar

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from latte_convert.report import text
from latte_convert.report.charts import (
    MARKS,
    block_chart,
    blocks,
    comparison_chart,
    frontier_chart,
    sensitivity_bars,
)
from latte_convert.report.compare import flops_share
from latte_convert.report.curves import VARIANTS, bench_charts
from latte_convert.report.heatmap import heatmap_uri
from latte_convert.report.palette import DARK, LIGHT, RAMP, declarations
from latte_convert.report.schema import FrontierPoint, Report
from latte_convert.report.verdict import LEVELS, level_of, worth_of
from latte_convert.wording import rounded_down

_T = TypeVar("_T")

FEW_SAMPLES = 16
"""Below so many held-out samples the page warns that their mean may be off."""

SCORERS = {
    "paper": "How far each block\u2019s output moves when every site is converted",
    "isolated": "How far the final output moves when a site is the only one that is converted",
    "greedy": "How far the final output moves when a site is converted behind those that were chosen before it",
}
"""What the sensitivity of a site means, by the recipe's scorer."""


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
    worth = worth_of(report)
    weighed = plans(report)
    return template("report.html.j2").render(
        report=report,
        name=model_name(report),
        kernels=kernel_counts(report),
        several_kernels="," in kernel_counts(report),
        worth=worth,
        levels=LEVELS,
        level=level_of(worth.likeness) if worth else None,
        worse=_worse_output(report),
        few_samples=FEW_SAMPLES,
        below_min_tokens=_below_min_tokens(report),
        scorer=SCORERS.get(str(report.recipe.get("scorer")), "How far outputs move when sites are converted"),
        bars=sensitivity_bars(report),
        blocks=blocks(report),
        chart=block_chart(blocks(report)),
        plans=weighed,
        held_out=report.fidelity.least.cosine if report.fidelity else None,
        frontier=frontier_chart(weighed),
        curves=bench_charts(report.bench),
        settings=settings(report),
    )


def plans(report: Report) -> list[FrontierPoint]:
    """The plans that were weighed; the chosen one with its held-out cosine, the only one that is the hybrid's."""
    if report.fidelity is None:
        return report.frontier or []
    measured = {"cosine": report.fidelity.least.cosine}
    return [plan.model_copy(update=measured) if plan.chosen else plan for plan in report.frontier or ()]


def settings(report: Report) -> dict[str, Any]:
    """The recipe as it was applied: with the share that was converted, and ``min_tokens`` as the artifact has it."""
    eligible = sum(site.eligible for site in report.sites)
    applied = dict(report.recipe)
    if eligible and "ratio" in applied:
        share = len(report.converted) / eligible if applied["ratio"] is None else applied["ratio"]
        applied["ratio"] = f"{share:.3g} ({len(report.converted)} of {eligible} eligible sites)"
    if report.min_tokens is not None:
        applied["min_tokens"] = report.min_tokens
    return applied


def render_comparison(reports: Mapping[str, Report]) -> str:
    """Render several reports side by side as one HTML page without any outside reference.

    Args:
        reports: At least two, by the name that heads their column.

    Returns:
        The page; equal reports give equal text.
    """
    return template("compare.html.j2").render(
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
        level_of=level_of,
        flops_share=flops_share,
    )


def _union(groups: Iterable[Iterable[_T]]) -> list[_T]:
    """Everything that any group holds, once, in order of first appearance."""
    return list(dict.fromkeys(item for group in groups for item in group))


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
    worst = min(outputs, key=lambda name: outputs[name].alike)
    return worst if level_of(outputs[worst].alike).floor < level_of(report.fidelity.least.alike).floor else None


def _below_min_tokens(report: Report) -> int:
    """Converted sites whose held-out inputs were too short for the converted branch to run."""
    least = report.recipe.get("min_tokens") or 0
    tokens = report.cost.tokens if report.cost else {}
    return sum(name in tokens and tokens[name] < least for name in report.converted)


@cache
def template(name: str) -> Template:
    """A template of this folder."""

    def load(name: str) -> str:
        return resources.files("latte_convert.report").joinpath(name).read_text(encoding="utf-8")

    environment = Environment(loader=FunctionLoader(load), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals.update(
        times=text.times,
        cosine=rounded_down,
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
        light=declarations(LIGHT),
        dark=declarations(DARK),
        ramp=[f"rgb{colour}" for colour in RAMP],
    )
    return environment.get_template(name)
