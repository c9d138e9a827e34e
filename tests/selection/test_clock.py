"""The clock of plans that merge: what it foretells, and the lightest merging that it finds."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from latte_convert.selection.budget import Point
from latte_convert.selection.clock import LEAST, Clock
from latte_convert.selection.fast import BENDS
from latte_convert.selection.merging import schedule

BLOCKS = {f"encoder.layer.{index}": f"encoder.layer.{index}.attention" for index in range(6)}
NONE = Point({}, 1.0, 0.0)
FIRST = Point(dict.fromkeys(list(BLOCKS.values())[:3], 0), 0.5, 0.1)


def _time(point: Point) -> float:
    """Of a model whose attention takes half of its time, a fifth of that with kernels."""
    shares = [point.merges.get(block, 1.0) for block in BLOCKS]
    kernel = [site in point.kernels for site in BLOCKS.values()]
    return fmean(0.1 + 0.4 * s + (0.1 * s if fast else 0.5 * s**2) for s, fast in zip(shares, kernel, strict=True))


class _Stopwatch:
    """Measures without noise, and remembers what."""

    def __init__(self, extra=lambda point: 0.0):
        self.seen: list[Point] = []
        self.extra = extra

    def __call__(self, point: Point) -> float:
        self.seen.append(point)
        return 1 / (_time(point) + self.extra(point))


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("base", [NONE, FIRST], ids=["none", "first"])
def test_the_lightest_that_is_fast_enough(base, bend):
    watch = _Stopwatch()
    clock = Clock(BLOCKS, watch)
    if base.kernels:
        clock.time(base)
    for target in (1.3, 1.5, 1.8):
        found = clock.lightest(base, target, bend)
        assert found is not None
        assert found.kernels == base.kernels
        assert 0.98 / target <= _time(found) <= 1 / target
    assert len(watch.seen) <= 9
    most = 1 / _time(replace(base, merges=schedule(list(BLOCKS), LEAST, bend)))
    assert clock.lightest(base, most + 0.1, bend) is None
    assert clock.fastest[1] >= 1.8


def test_kernels_that_are_fast_enough_merge_nothing():
    clock = Clock(BLOCKS, _Stopwatch())
    clock.time(FIRST)
    assert clock.lightest(FIRST, 1.1, 1.0) == FIRST


def test_what_has_been_measured_is_foretold():
    clock = Clock(BLOCKS, _Stopwatch())
    clock.time(FIRST)
    plan = replace(FIRST, merges=schedule(list(BLOCKS), 0.7, 0.6))
    assert clock.foretold(plan) == pytest.approx(_time(plan))


@pytest.mark.parametrize("target", [1.2, 1.4, 1.7])
def test_a_clock_that_is_wrong_at_first_is_set_right(target):
    """Merging itself takes time, which no sum over tokens foretells."""
    watch = _Stopwatch(lambda point: 0.05 if point.merges and 0.3 < min(point.merges.values()) < 0.9 else 0.0)
    found = Clock(BLOCKS, watch).lightest(NONE, target, 1.0)
    assert found is not None
    assert 0.9 / target <= 1 / watch(found) <= 1 / target


@pytest.mark.parametrize("speeds", [[0.9, 0.8], [1.5, 1.2], [1.0, 1.0]])
def test_times_that_are_noise_fool_no_one(speeds):
    measured = iter([*speeds, *[1.0] * 9])
    assert Clock(BLOCKS, lambda _plan: next(measured)).lightest(NONE, 1.4, 1.0) is None


def test_the_fastest_that_was_measured_is_kept():
    clock = Clock(BLOCKS, _Stopwatch())
    clock.time(FIRST)
    point, speed = clock.fastest
    assert point.merges == schedule(list(BLOCKS), LEAST, 0.35)
    assert speed == pytest.approx(1 / _time(point))
