"""Wall times of several ways of doing one thing, taken in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from latte_convert.bench.result import Timing

LEAST_SECONDS = 0.005
"""Shorter calls are repeated up to this long within one measurement, for the sake of the clock."""
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Timed:
    """Something to be timed.

    Attributes:
        call: What is timed.
        context: Entered before each measurement and left after it, outside the clock.
    """

    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]]


def take_turns(
    timed: Mapping[str, Timed], device: torch.device, *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Measure each in every round, so that whatever disturbs the machine disturbs all alike.

    Args:
        timed: By name.
        device: Synchronised before each look at the clock.
        rounds: Number of rounds. One more call of each comes before them, to warm up and to see how long it takes.
        seconds: Rounds end early when this much time is spent, but not before ``LEAST_ROUNDS``.

    Returns:
        Milliseconds a call, one a round, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in timed}
    numbers = {name: max(1, math.ceil(LEAST_SECONDS / measure(item, device))) for name, item in timed.items()}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        order = list(timed.items())
        for name, item in order[::-1] if done % 2 else order:  # a machine that slows down slows down either half
            times[name].append(measure(item, device, numbers[name]) * 1000)
    return times


def measure(item: Timed, device: torch.device, number: int = 1) -> float:
    """Seconds a call, the mean of ``number`` calls."""
    with item.context():
        synchronize(device)
        start = time.perf_counter()
        for _ in range(number):
            item.call()
        synchronize(device)
        return (time.perf_counter() - start) / number


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timing(times: Sequence[float]) -> Timing:
    """Median and quartiles of milliseconds."""
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return Timing(median_ms=median, lower_ms=lower, upper_ms=upper, rounds=len(times))


def ratio(times: Sequence[float], original: Sequence[float]) -> float:
    """Median over the rounds of time / original's time."""
    return statistics.median(a / b for a, b in zip(times, original, strict=True))
