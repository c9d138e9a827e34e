from __future__ import annotations

import math

import pytest

from latte_convert.report.axes import Axis, bar_axis, cosine_axis, length_axis, linear_axis, log_axis, ratio_axis


def labels(axis: Axis) -> list[str]:
    return [tick.label for tick in axis.ticks]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.93, 1.0, [0.92, 0.94, 0.96, 0.98, 1]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_linear(low: float, high: float, ticks: list[float]) -> None:
    axis = linear_axis("", low, high)
    assert axis.low <= low <= high <= axis.high
    assert axis.low < axis.high
    assert [tick.value for tick in axis.ticks][: len(ticks)] == pytest.approx(ticks)


def test_log() -> None:
    axis = log_axis("", 3.0, 450.0)
    assert [tick.value for tick in axis.ticks] == [2, 10, 50, 200]
    assert (axis.low, axis.high) == (2, 500)
    assert axis.at(2) == 0
    assert axis.down(500) == 0
    assert axis.at((2 * 500) ** 0.5) == pytest.approx(50, abs=0.01)


@pytest.mark.parametrize("value", [1.0, 1e-6, 7e8])
def test_log_of_one_value(value: float) -> None:
    axis = log_axis("", value, value)
    assert axis.low <= value <= axis.high
    assert axis.low < axis.high
    assert 2 <= len(axis.ticks) <= 6


class TestCosines:
    def test_ticks_near_one_differ(self) -> None:
        axis = cosine_axis("", [0.99991, 0.99996, 0.99999])
        assert labels(axis) == ["0.99999", "0.99998", "0.99995", "0.9999"]
        # Equal factors of 1 - cosine are equal distances: from 1e-5 to 1e-4 is a decade.
        assert axis.at(0.9999) == 0
        assert axis.at(0.99999) == 100
        assert axis.at(1 - 10**-4.5) == pytest.approx(50, abs=0.01)

    def test_what_is_identical_lies_at_the_top_on_a_tick_of_its_own(self) -> None:
        axis = cosine_axis("", [0.95, 1.0, 1.0000001])
        assert labels(axis)[-1] == "1"
        assert axis.at(1.0) == axis.at(1.0000001) == 100
        assert axis.at(0.95) < axis.at(0.99) < 100

    @pytest.mark.parametrize("cosines", [[1.0], [0.9999999], [1 - 1.5e-7], [-0.5, 0.2], [-1.0], [0.3]])
    def test_every_cosine_has_a_place(self, cosines: list[float]) -> None:
        axis = cosine_axis("", cosines)
        places = [axis.at(cosine) for cosine in sorted(cosines)]
        assert places == sorted(places)
        assert all(0 <= place <= 100 for place in places)
        assert len(set(labels(axis))) == len(axis.ticks) >= 2


class TestRatios:
    def test_a_gain_of_a_fifth_can_be_seen(self) -> None:
        axis = ratio_axis("", [1.2, 0.95])
        assert axis.at(1.2) - axis.at(1.0) > 40

    def test_large_ratios_are_logarithmic_and_hold_one(self) -> None:
        axis = ratio_axis("", [0.5, 12.0])
        assert labels(axis) == ["0.5x", "1x", "2x", "5x", "10x", "20x"]
        assert axis.at(2) - axis.at(1) == pytest.approx(axis.at(10) - axis.at(5), abs=0.02)


class TestBars:
    def test_linear_from_zero(self) -> None:
        axis = bar_axis("", [0.02, 0.9, 1.9])
        assert labels(axis) == ["0", "0.5", "1", "1.5", "2"]
        assert (axis.at(0), axis.at(0.5), axis.at(2)) == (0, 25, 100)

    def test_log_over_two_decades(self) -> None:
        axis = bar_axis("", [0.01, 0.5, 5.0])
        assert labels(axis) == ["10⁻³", "10⁻²", "10⁻¹", "10⁰", "10¹"]
        assert axis.at(0.01) == 25  # a smallest value on a power of ten still has a bar
        assert axis.at(1.0) == 75
        assert axis.at(-1e-7) == 0

    def test_exactly_two_decades_stay_linear(self) -> None:
        assert bar_axis("", [0.01, 1.0]).low == 0

    @pytest.mark.parametrize("values", [[], [0.0], [-1e-8, 0.0]])
    def test_nothing_positive(self, values: list[float]) -> None:
        axis = bar_axis("", values)
        assert [axis.at(value) for value in values] == [0] * len(values)

    @pytest.mark.parametrize("values", [[1e-12, 1e12], [3e-9, 7e-9], [9.99], [10.0], [1e-3, 2.5, 0.7]])
    def test_every_value_and_tick_lies_inside(self, values: list[float]) -> None:
        axis = bar_axis("", values)
        lengths = [axis.at(value) for value in sorted(values)]
        assert lengths == sorted(lengths)
        assert 0 < lengths[0] <= lengths[-1] <= 100
        assert 2 <= len(axis.ticks) <= 8
        assert all(axis.low <= tick.value * (1 + 1e-9) <= axis.high * (1 + 1e-6) for tick in axis.ticks)


def test_lengths_are_ticks_where_there_is_room() -> None:
    axis = length_axis("", [257, 1370, 785, 4097, 8282])
    assert labels(axis) == ["257", "785", "4,097", "8,282"]  # 785 to 1,370 is less than a fifth of the axis
    assert axis.at(math.sqrt(257 * 8282)) == pytest.approx(50, abs=0.01)
    assert labels(length_axis("", [512])) == ["512"]
