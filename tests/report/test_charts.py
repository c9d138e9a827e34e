from __future__ import annotations

import pytest
from report.samples import LONG, make_bench, make_full, make_report, site

from latte_convert.report.charts import (
    block_chart,
    blocks,
    comparison_chart,
    frontier_chart,
    pareto,
    sensitivity_bars,
)
from latte_convert.report.curves import bench_charts
from latte_convert.report.schema import FrontierPoint, Report


def point(share: float, cosine: float | None, *, predicted: float | None = None, **kernels: int) -> FrontierPoint:
    return FrontierPoint(
        converted=sum(kernels.values()),
        kernels=kernels,
        flops_share=share,
        predicted_error=predicted,
        cosine=cosine,
        chosen=False,
    )


def test_bars_keep_the_order_and_leave_out_the_ineligible() -> None:
    rows = [
        site("z", 1.0, converted=False),
        site("m", None, converted=False),
        site("a", 0.5, converted=True),
        site("x", None, converted=False, reason="no"),
    ]
    bars = sensitivity_bars(make_report().model_copy(update={"sites": rows}))
    assert [(each.name, value) for each, value in bars.rows] == [("z", 1.0), ("m", None), ("a", 0.5)]
    assert (bars.axis.at(1.0), bars.axis.at(0.5)) == (100, 50)


class TestBlocks:
    def test_numbered_in_order_and_marked(self) -> None:
        report = make_report(sites=2, convert=1, cosine=0.93)
        assert [(each.number, each.cosine, each.converted) for each in blocks(report)] == [
            (1, pytest.approx(0.965), True),
            (2, pytest.approx(0.93), False),
        ]

    def test_a_name_that_begins_like_another(self) -> None:
        report = make_report(sites=12, convert=1, converted=["encoder.layer.10.attention.attention"])
        assert [each.number for each in blocks(report) if each.converted] == [11]

    def test_chart(self) -> None:
        chart = block_chart(blocks(make_report(sites=2, convert=1, cosine=0.93)))
        assert chart is not None
        assert [(series.label, len(series.dots)) for series in chart.series] == [
            ("has a converted site (filled)", 1),
            ("all exact (open)", 1),
        ]
        assert [chart.x.at(x) for x, _ in chart.trend] == [25, 75]
        assert block_chart([]) is None

    def test_many_blocks_have_few_numbers(self) -> None:
        chart = block_chart(blocks(make_report(sites=48, pattern=LONG)))
        assert chart is not None
        assert [tick.value for tick in chart.x.ticks] == list(range(1, 49, 4))


def test_pareto_keeps_what_nothing_beats() -> None:
    points = [(0.5, 0.9), (0.3, 0.95), (0.2, 0.5), (0.4, 0.95), (1.0, 1.0), (0.2, 0.4)]
    assert pareto(points) == [(0.2, 0.5), (0.3, 0.95), (1.0, 1.0)]


class TestFrontier:
    def test_points_and_front(self) -> None:
        chart = frontier_chart([point(1.0, 1.0), point(0.5, 0.5, latte=4), point(0.25, None, predicted=0.25, latte=8)])
        assert chart is not None
        assert [series.label for series in chart.series] == ["exact", "latte"]
        assert [(dot.x, dot.y, dot.solid) for dot in chart.series[1].dots] == [(0.5, 0.5, True), (0.25, 0.75, False)]
        assert chart.trend == ((0.25, 0.75), (1.0, 1.0))
        assert (chart.x.at(0), chart.x.at(0.5), chart.x.at(1)) == (0, 50, 100)

    def test_mixed_plans_have_a_mark_of_their_own(self) -> None:
        chart = frontier_chart([point(0.5, 0.9, latte=4, monarch=2), point(0.6, 0.9, latte=4)])
        assert chart is not None
        assert [series.label for series in chart.series] == ["several kernels", "latte"]

    def test_nothing_known(self) -> None:
        assert frontier_chart([]) is None
        assert frontier_chart([point(0.5, None, latte=4)]) is None


class TestBench:
    def test_one_chart_for_each_quantity(self) -> None:
        assert [chart.title for chart in bench_charts(make_bench())] == [
            "Speed of the whole model",
            "Speed of the attention of the converted sites",
            "Memory of a forward pass",
            "Memory of the largest attention call",
        ]
        assert bench_charts(None) == []

    def test_values_are_ratios_to_the_original(self) -> None:
        speed, _, memory, _ = bench_charts(make_bench())
        # At 1,370 tokens: (40 + 1370² / 50000) / (40 + 1370 / 45), and bytes 40 MiB + 3000 N over 40 MiB + 24 N².
        hybrid = dict(speed.series[0].points)
        assert hybrid[1370] == pytest.approx(77.538 / 70.444, abs=1e-4)
        assert dict(memory.series[0].points)[1370] == pytest.approx(46_053_040 / 86_988_640, abs=1e-6)
        assert speed.level is not None
        assert speed.y.low <= speed.level.value <= speed.y.high

    def test_what_has_nothing_to_be_compared_with_has_no_point(self) -> None:
        memory = bench_charts(make_bench())[2]
        assert [tokens for tokens, _ in memory.series[0].points] == [257, 785, 1370, 4097]  # 8,282 ran out of memory

    def test_crossover(self) -> None:
        speed = bench_charts(make_bench())[0]
        assert [(rule.value, rule.label) for rule in speed.rules] == [
            (1370, "hybrid is faster from 1,370 tokens on"),
            (785, "compiled is faster from 785 tokens on"),
        ]
        assert not bench_charts(make_bench(crossover=None))[0].rules[0].label.startswith("hybrid")

    def test_a_variant_looks_the_same_in_every_chart(self) -> None:
        styles = {(series.label, series.style) for chart in bench_charts(make_bench()) for series in chart.series}
        assert len(styles) == len(dict(styles)) == 2


def test_comparison_needs_two_that_can_be_placed() -> None:
    reports: dict[str, Report] = {"a": make_full(), "b": make_report(cosine=0.98)}
    chart = comparison_chart(reports)
    assert chart is not None
    assert [series.label for series in chart.series] == ["a", "b"]
    assert comparison_chart({"a": make_full(), "b": make_report(fidelity=False)}) is None
