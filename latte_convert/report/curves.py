"""The frontier of plans, latency and memory over sequence lengths, artifacts side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from latte_convert.bench.result import BenchReport, Crossover, Timing, VariantResult
from latte_convert.report.axes import MARKS, Axis, Chart, Dot, Series, linear_axis, log_axis
from latte_convert.report.charts import Tick
from latte_convert.report.compare import flops_share
from latte_convert.report.schema import FrontierPoint, Report


def frontier_chart(points: Sequence[FrontierPoint]) -> Chart | None:
    """Fidelity of every plan against its cost; the line joins the plans that no other one beats in both."""
    values = [(point, fidelity_of(point)) for point in points]
    placed = [(point, value) for point, value in values if value is not None]
    if not placed:
        return None
    cosines = [value for _, value in placed]
    y = linear_axis(min(cosines), max(*cosines, min(1.0, max(cosines) + 1e-3)))
    x = linear_axis(0.0, max(point.flops_share for point, _ in placed))
    kinds = list(dict.fromkeys(plan_kind(point) for point, _ in placed))
    series = tuple(
        Series(
            label=kind,
            style=i % len(MARKS),
            dots=tuple(
                Dot(
                    x=x.at(point.flops_share),
                    y=y.down(value),
                    label=f"{point.converted} sites, {value:.4f}",
                    solid=point.cosine is not None,
                    ringed=point.chosen,
                )
                for point, value in placed
                if plan_kind(point) == kind
            ),
            line=False,
        )
        for i, kind in enumerate(kinds)
    )
    front = pareto([(point.flops_share, value) for point, value in placed])
    return Chart(
        title="Fidelity and cost of the plans",
        summary=f"{len(placed)} plans, {len(front)} of them on the frontier. The table below has the numbers.",
        x_name="Attention FLOPs, share of exact attention",
        y_name="Cosine",
        x_ticks=tuple(Tick(x.at(tick), f"{100 * tick:.3g} %") for tick in x.ticks),
        y_ticks=tuple(Tick(y.down(tick), f"{tick:.4g}") for tick in y.ticks),
        series=series,
        front=" ".join(f"{x.at(share)},{y.down(value)}" for share, value in front),
    )


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
    """The points of which no other is both cheaper (first) and better (second), the cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, quality in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or quality > front[-1][1]:
            front.append((cost, quality))
    return front


VARIANTS: dict[str, str] = {
    "original": "original",
    "hybrid": "hybrid",
    "hybrid_compiled": "hybrid, compiled kernels",
    "pooled": "pooled tokens",
    "merged": "merged tokens",
}
"""What the page calls a variant of ``latte bench``; the order gives each its colour, mark and dash in every chart."""


@dataclass(frozen=True)
class Measure:
    """A quantity that ``latte bench`` measures for every variant at every length."""

    title: str
    unit: str
    read: Callable[[VariantResult], float | None]
    crossovers: Callable[[BenchReport], Mapping[str, Crossover | None]]


def _ms(timing: Timing | None) -> float | None:
    return timing.median_ms if timing else None


def _mib(size: int | None) -> float | None:
    return size / 2**20 if size else None


MEASURES = (
    Measure(
        "Latency of the whole model",
        "Milliseconds",
        lambda variant: _ms(variant.forward),
        lambda bench: {"hybrid": bench.crossover, "compiled": bench.crossover_compiled},
    ),
    Measure(
        "Latency of the attention of the converted sites",
        "Milliseconds",
        lambda variant: _ms(variant.attention),
        lambda bench: {"hybrid": bench.crossover_attention},
    ),
    Measure("Memory of a forward pass", "Peak MiB", lambda variant: _mib(variant.forward_memory_bytes), lambda _: {}),
    Measure(
        "Memory of the largest attention call",
        "Peak MiB",
        lambda variant: _mib(variant.attention_memory_bytes),
        lambda _: {},
    ),
)


def bench_charts(bench: BenchReport | None) -> list[Chart]:
    """Latency and memory over sequence lengths, what was measured of them; both axes are logarithmic."""
    charts = [bench_chart(bench, measure) for measure in MEASURES] if bench else []
    return [chart for chart in charts if chart is not None]


def bench_rows(bench: BenchReport, measure: Measure) -> dict[str, list[tuple[int, float]]]:
    """Pairs of tokens and value by variant, for the variants that have any, in order of ``VARIANTS``."""
    rows: dict[str, list[tuple[int, float]]] = {}
    for name in VARIANTS:
        for length in sorted(bench.lengths, key=lambda length: length.tokens):
            for variant in length.variants:
                value = measure.read(variant) if variant.name == name else None
                if value is not None and value > 0:
                    rows.setdefault(name, []).append((length.tokens, value))
    return rows


def bench_chart(bench: BenchReport, measure: Measure) -> Chart | None:
    """One measure over the sequence lengths; None where nothing was measured."""
    rows = bench_rows(bench, measure)
    if not rows:
        return None
    x, y = bench_axes(rows)
    series = tuple(
        Series(
            label=VARIANTS[name],
            style=list(VARIANTS).index(name),
            dots=tuple(Dot(x.at(at), y.down(value), f"{at:,} tokens: {value:.4g}") for at, value in pairs),
            line=True,
        )
        for name, pairs in rows.items()
    )
    return Chart(
        title=measure.title,
        summary=f"{len(rows)} variants, {x.low:,.0f} to {x.high:,.0f} tokens. The table below has the numbers.",
        x_name="Tokens, logarithmic",
        y_name=f"{measure.unit}, logarithmic",
        x_ticks=tuple(Tick(x.at(tick), f"{tick:,.0f}") for tick in x.ticks),
        y_ticks=tuple(Tick(y.down(tick), f"{tick:,.6g}") for tick in y.ticks),
        series=series,
        rules=tuple(
            Tick(x.at(found.tokens), f"{name} is faster from {found.tokens:,} tokens on")
            for name, found in measure.crossovers(bench).items()
            if found and found.tokens
        ),
    )


def bench_axes(rows: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[Axis, Axis]:
    """Logarithmic axes for tokens, with ticks at lengths that were measured, and for the values; not for no rows."""
    lengths = sorted({tokens for pairs in rows.values() for tokens, _ in pairs})
    values = [value for pairs in rows.values() for _, value in pairs]
    tokens = Axis(lengths[0], max(lengths[-1], lengths[0] + 1), True, tuple(map(float, _thinned(lengths))))
    return tokens, log_axis(min(values), max(values))


def _thinned(lengths: Sequence[int]) -> list[int]:
    """At most five of the lengths that were measured, far enough apart on a logarithmic axis for their labels."""
    low, high = math.log(lengths[0]), math.log(max(lengths[-1], lengths[0] + 1))
    kept = [lengths[0]]
    for length in lengths[1:-1]:
        gap = 0.2 * (high - low)
        if math.log(length / kept[-1]) >= gap and high - math.log(length) >= gap:
            kept.append(length)
    return [*kept, *lengths[-1:]] if len(lengths) > 1 else kept


def comparison_chart(reports: Mapping[str, Report]) -> Chart | None:
    """Held-out cosine of artifacts against their cost."""
    placed = []
    for name, report in reports.items():
        share = flops_share(report)
        if report.fidelity and share is not None:
            placed.append((name, share, report.fidelity.outputs[report.fidelity.primary].cosine))
    if len(placed) < 2:
        return None
    y = linear_axis(min(cosine for *_, cosine in placed), 1.0)
    x = linear_axis(0.0, max(share for _, share, _ in placed))
    return Chart(
        title="Fidelity and cost of the artifacts",
        summary=f"{len(placed)} artifacts. The table has the numbers.",
        x_name="Attention FLOPs, share of exact attention",
        y_name="Held-out cosine",
        x_ticks=tuple(Tick(x.at(tick), f"{100 * tick:.3g} %") for tick in x.ticks),
        y_ticks=tuple(Tick(y.down(tick), f"{tick:.4g}") for tick in y.ticks),
        series=tuple(
            Series(name, i % len(MARKS), (Dot(x.at(share), y.down(cosine), f"{name}: {cosine:.4f}"),), False)
            for i, (name, share, cosine) in enumerate(placed)
        ),
    )
