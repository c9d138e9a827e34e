"""What is drawn of a report, in values: the templates draw these, on the page and as files.

Series differ by colour, by mark and by dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from latte_convert.report.axes import Axis, Tick, bar_axis, cosine_axis, linear_axis, number_axis
from latte_convert.report.compare import flops_share
from latte_convert.report.schema import FrontierPoint, Report, SiteReport
from latte_convert.wording import rounded_down

MARKS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5l4.8,8.4h-9.6z",
    "M0,-5.2l5.2,5.2l-5.2,5.2l-5.2,-5.2z",
    "M0,4.9l4.8,-8.4h-9.6z",
)
"""SVG paths around (0, 0): circle, square, triangle, diamond, inverted triangle. Series take them in turn."""

COSINE = "Cosine with the original; the axis is logarithmic in 1 - cosine"
FLOPS = "Attention FLOPs, share of exact attention"


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
    """Points of one kind, joined by a line or not; ``style`` picks colour, mark and dash."""

    label: str
    style: int
    dots: tuple[Dot, ...]
    line: bool = False
    solid: bool = True

    @property
    def points(self) -> list[tuple[float, float]]:
        """Where the marks are."""
        return [(dot.x, dot.y) for dot in self.dots]


@dataclass(frozen=True)
class Chart:
    """Series over two axes; ``summary`` says in words what is shown, for those who do not see it.

    Attributes:
        rules: Vertical lines, each with what it marks.
        level: A horizontal line, such as that of the original.
        trend: A thin line behind the marks.
    """

    title: str
    summary: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Tick, ...] = ()
    level: Tick | None = None
    trend: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Bars:
    """A bar for every eligible site, in order of the module tree; a site without a finite score has no bar."""

    axis: Axis
    rows: tuple[tuple[SiteReport, float | None], ...]


@dataclass(frozen=True)
class Block:
    """A block of the model, numbered in order; ``converted`` where a site in it is."""

    number: int
    name: str
    cosine: float
    relative_error: float | None
    converted: bool


def sensitivity_bars(report: Report) -> Bars:
    """The score of every eligible site."""
    rows = [(site, site.score.value if site.score else None) for site in report.sites if site.eligible]
    axis = bar_axis("Sensitivity", [value for _, value in rows if value is not None])
    return Bars(axis, tuple(rows))


def blocks(report: Report) -> list[Block]:
    """The blocks whose output was measured."""
    measured = report.fidelity.blocks if report.fidelity else {}
    return [
        Block(
            number,
            name,
            agreement.cosine,
            agreement.relative_error,
            any(site == name or site.startswith(f"{name}.") for site in report.converted),
        )
        for number, (name, agreement) in enumerate(measured.items(), start=1)
    ]


def block_chart(blocks: Sequence[Block]) -> Chart | None:
    """Cosine of every block's output over its position."""
    if not blocks:
        return None
    series = tuple(
        Series(
            label=label,
            style=style,
            dots=tuple(
                Dot(block.number, block.cosine, f"{block.number}: {rounded_down(block.cosine)}", solid=converted)
                for block in blocks
                if block.converted is converted
            ),
            solid=converted,
        )
        for converted, style, label in ((True, 1, "has a converted site (filled)"), (False, 0, "all exact (open)"))
    )
    return Chart(
        title="Cosine by block",
        summary=f"{len(blocks)} blocks in order. The table below has the numbers.",
        x=number_axis("Block", len(blocks)),
        y=cosine_axis(COSINE, [block.cosine for block in blocks]),
        series=tuple(each for each in series if each.dots),
        trend=tuple((block.number, block.cosine) for block in blocks),
    )


def frontier_chart(points: Sequence[FrontierPoint]) -> Chart | None:
    """Fidelity of every plan against its cost; the line joins the Pareto frontier."""
    placed = [(point, value) for point in points if (value := fidelity_of(point)) is not None]
    if not placed:
        return None
    kinds = list(dict.fromkeys(plan_kind(point) for point, _ in placed))
    front = pareto([(point.flops_share, value) for point, value in placed])
    return Chart(
        title="Fidelity and cost of the plans",
        summary=f"{len(placed)} plans, {len(front)} of them on the frontier. The table below has the numbers.",
        x=linear_axis(FLOPS, 0.0, max(point.flops_share for point, _ in placed), _percent),
        y=cosine_axis(COSINE, [value for _, value in placed]),
        series=tuple(
            Series(
                label=kind,
                style=i % len(MARKS),
                dots=tuple(
                    Dot(
                        point.flops_share,
                        value,
                        f"{point.converted} sites, {rounded_down(value)}",
                        solid=point.cosine is not None,
                        ringed=point.chosen,
                    )
                    for point, value in placed
                    if plan_kind(point) == kind
                ),
            )
            for i, kind in enumerate(kinds)
        ),
        trend=tuple(front),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def fidelity_of(point: FrontierPoint) -> float | None:
    """The measured cosine of a plan, else the predicted one."""
    if point.cosine is not None:
        return point.cosine
    return None if point.predicted_error is None else 1 - point.predicted_error


def plan_kind(point: FrontierPoint) -> str:
    """The kernel of a plan, or that it has several."""
    names = [name for name, count in point.kernels.items() if count]
    return "exact" if not names else names[0] if len(names) == 1 else "several kernels"


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier of pairs of cost and quality: lower cost, higher quality; the cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((cost, quality))
    return front


def comparison_chart(reports: Mapping[str, Report]) -> Chart | None:
    """Held-out cosine of artifacts against their cost."""
    placed = [
        (name, share, report.fidelity.least.cosine)
        for name, report in reports.items()
        if report.fidelity and (share := flops_share(report)) is not None
    ]
    if len(placed) < 2:
        return None
    return Chart(
        title="Fidelity and cost of the artifacts",
        summary=f"{len(placed)} artifacts. The table has the numbers.",
        x=linear_axis(FLOPS, 0.0, max(share for _, share, _ in placed), _percent),
        y=cosine_axis(COSINE, [cosine for *_, cosine in placed]),
        series=tuple(
            Series(name, i % len(MARKS), (Dot(share, cosine, f"{name}: {rounded_down(cosine)}"),))
            for i, (name, share, cosine) in enumerate(placed)
        ),
    )
