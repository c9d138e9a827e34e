from __future__ import annotations

import pytest
from report.samples import make_bench, make_full, make_report

from latte_convert.report.axes import linear_axis, log_axis
from latte_convert.report.curves import bench_charts, comparison_chart, frontier_chart, pareto
from latte_convert.report.schema import FrontierPoint


def point(share: float, cosine: float | None, *, predicted: float | None = None, **kernels: int) -> FrontierPoint:
    return FrontierPoint(
        converted=sum(kernels.values()),
        kernels=kernels,
        flops_share=share,
        predicted_error=predicted,
        cosine=cosine,
        chosen=False,
    )


class TestAxes:
    @pytest.mark.parametrize(
        ("low", "high", "ticks"),
        [
            (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
            (0.93, 1.0, [0.92, 0.94, 0.96, 0.98, 1]),
            (3.0, 3.0, [3.0]),
        ],
    )
    def test_linear(self, low: float, high: float, ticks: list[float]) -> None:
        axis = linear_axis(low, high)
        assert axis.low <= low <= high <= axis.high
        assert axis.low < axis.high
        assert list(axis.ticks)[: len(ticks)] == pytest.approx(ticks)

    def test_log(self) -> None:
        axis = log_axis(3.0, 450.0)
        assert axis.ticks == (2, 10, 50, 200)
        assert (axis.low, axis.high) == (2, 500)
        assert axis.at(2) == 0
        assert axis.down(500) == 0
        assert axis.at((2 * 500) ** 0.5) == pytest.approx(50, abs=0.01)

    @pytest.mark.parametrize("value", [1.0, 1e-6, 7e8])
    def test_log_of_one_value(self, value: float) -> None:
        axis = log_axis(value, value)
        assert axis.low <= value <= axis.high
        assert axis.low < axis.high
        assert 2 <= len(axis.ticks) <= 6


def test_pareto_keeps_what_nothing_beats() -> None:
    points = [(0.5, 0.9), (0.3, 0.95), (0.2, 0.5), (0.4, 0.95), (1.0, 1.0), (0.2, 0.4)]
    assert pareto(points) == [(0.2, 0.5), (0.3, 0.95), (1.0, 1.0)]


class TestFrontier:
    def test_places(self) -> None:
        chart = frontier_chart([point(1.0, 1.0), point(0.5, 0.5, latte=4), point(0.25, None, predicted=0.25, latte=8)])
        assert chart is not None
        assert [series.label for series in chart.series] == ["exact", "latte"]
        latte = chart.series[1]
        # The axes run from 0 to 1 and from 0.5 to 1.
        assert [(dot.x, dot.y, dot.solid) for dot in latte.dots] == [(50, 100, True), (25, 50, False)]
        assert chart.front == "25.0,50.0 100.0,0.0"

    def test_mixed_plans_have_a_mark_of_their_own(self) -> None:
        chart = frontier_chart([point(0.5, 0.9, latte=4, monarch=2), point(0.6, 0.9, latte=4)])
        assert chart is not None
        assert [series.label for series in chart.series] == ["several kernels", "latte"]

    def test_nothing_known(self) -> None:
        assert frontier_chart([]) is None
        assert frontier_chart([point(0.5, None, latte=4)]) is None

    @pytest.mark.parametrize("cosine", [-0.3, 0.9999999, 1.0000001])
    def test_one_plan(self, cosine: float) -> None:
        chart = frontier_chart([point(0.5, cosine, latte=4)])
        assert chart is not None
        assert 0 <= chart.series[0].dots[0].y <= 100


class TestBench:
    def test_one_chart_for_each_quantity(self) -> None:
        charts = bench_charts(make_bench())
        assert [chart.title for chart in charts] == [
            "Latency of the whole model",
            "Latency of the attention of the converted sites",
            "Memory of a forward pass",
            "Memory of the largest attention call",
        ]
        assert bench_charts(None) == []

    def test_what_did_not_run_has_no_point(self) -> None:
        latency = bench_charts(make_bench())[0]
        dots = {series.label: len(series.dots) for series in latency.series}
        assert dots == {"original": 4, "hybrid": 5, "hybrid, compiled kernels": 5}

    def test_crossover(self) -> None:
        latency = bench_charts(make_bench())[0]
        hybrid = next(series for series in latency.series if series.label == "hybrid")
        assert [rule.label for rule in latency.rules] == [
            "hybrid is faster from 1,370 tokens on",
            "compiled is faster from 785 tokens on",
        ]
        assert latency.rules[0].at == hybrid.dots[2].x  # the third length is 1,370 tokens
        assert not bench_charts(make_bench(crossover=None))[0].rules[0].label.startswith("hybrid")

    def test_a_variant_looks_the_same_in_every_chart(self) -> None:
        styles = {(series.label, series.style) for chart in bench_charts(make_bench()) for series in chart.series}
        assert len(styles) == len(dict(styles)) == 3


def test_comparison_needs_two_that_can_be_placed() -> None:
    chart = comparison_chart({"a": make_full(), "b": make_report(cosine=0.98)})
    assert chart is not None
    assert [series.label for series in chart.series] == ["a", "b"]
    assert comparison_chart({"a": make_full(), "b": make_report(fidelity=False)}) is None
