"""Statistics of measurements, and the order they are taken in."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from latte_convert.bench import timing
from latte_convert.bench.timing import Timed, ratio, take_turns


def test_median_and_quartiles():
    found = timing.timing([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.median_ms, found.lower_ms, found.upper_ms, found.rounds) == (3.0, 2.0, 4.0, 5)


def test_one_measurement_is_all_there_is():
    found = timing.timing([7.0])
    assert (found.median_ms, found.lower_ms, found.upper_ms, found.rounds) == (7.0, 7.0, 7.0, 1)


def test_the_ratio_is_that_of_pairs():
    # The machine slows down by ten: the ratio of medians would be 20 / 10, of pairs it is 2, 2, 0.5.
    assert ratio([2.0, 20.0, 5.0], [1.0, 10.0, 10.0]) == 2.0


def test_variants_take_turns_in_their_contexts(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    events: list[str] = []

    @contextmanager
    def installed(name: str):
        events.append(f"+{name}")
        yield
        events.append(f"-{name}")

    timed = {name: Timed(lambda name=name: events.append(name), lambda name=name: installed(name)) for name in "ab"}
    times = take_turns(timed, torch.device("cpu"), rounds=2, seconds=60)
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    a, b = ["+a", "a", "-a"], ["+b", "b", "-b"]
    assert events == [*a, *b, *a, *b, *b, *a]  # warm-up, then two rounds, the second reversed


def test_rounds_end_when_the_time_is_spent_but_not_before_three():
    timed = {"a": Timed(lambda: None, lambda: torch.no_grad())}
    assert len(take_turns(timed, torch.device("cpu"), rounds=50, seconds=0.0)["a"]) == 3


def test_short_calls_are_repeated(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(timing.time, "perf_counter", iter(range(1000)).__next__)  # each look is a second later
    calls: list[int] = []
    take_turns({"a": Timed(lambda: calls.append(1), torch.no_grad)}, torch.device("cpu"), rounds=1, seconds=60)
    assert len(calls) == 2
    monkeypatch.setattr(timing, "LEAST_SECONDS", 4.0)
    calls.clear()
    times = take_turns({"a": Timed(lambda: calls.append(1), torch.no_grad)}, torch.device("cpu"), rounds=1, seconds=60)
    assert len(calls) == 1 + 4
    assert times["a"] == [pytest.approx(250.0)]  # one second for four calls
