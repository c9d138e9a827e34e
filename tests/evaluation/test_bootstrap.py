from __future__ import annotations

import math

import numpy as np
import pytest

from latte_convert.evaluation.bootstrap import intervals, retention


def mean(records) -> dict[str, float]:
    return {"accuracy": float(np.mean(records))}


def spread(original, hybrid, **options):
    settings = {"resamples": 400, "seed": 0, **options}
    return intervals(mean, original, hybrid, {"accuracy": False}, **settings)["accuracy"]


@pytest.mark.parametrize(
    ("original", "hybrid", "lower", "expected"),
    [
        (0.8, 0.6, False, 0.75),
        (0.5, 0.6, False, 1.2),
        (0.2, 0.6, True, 0.5),  # word accuracy falls from 0.8 to 0.4
        (0.5, 1.7, True, 0.0),  # more errors than words
        (0.5, -0.1, False, 0.0),
        (0.0, 0.5, False, None),
        (-0.2, -0.2, False, None),
        (1.0, 0.5, True, None),
        (math.nan, 0.5, False, None),
        (0.5, math.nan, False, None),
    ],
)
def test_retention(original, hybrid, lower, expected):
    assert retention(original, hybrid, lower_is_better=lower) == (None if expected is None else pytest.approx(expected))


def test_the_same_resample_scores_both():
    noisy = np.random.default_rng(1).random(20)
    assert spread(noisy, noisy.copy()) == (1.0, 1.0)
    low, high = spread(noisy, noisy / 2)
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_interval_is_that_of_the_normal_approximation():
    # The original is right everywhere and the hybrid on 75 of 100: the ratio is a proportion, sd sqrt(p q / n).
    hybrid = np.array([1.0] * 75 + [0.0] * 25)
    low, high = spread(np.ones(100), hybrid, resamples=4000)
    half = 1.96 * math.sqrt(0.75 * 0.25 / 100)
    assert low == pytest.approx(0.75 - half, abs=0.012)
    assert high == pytest.approx(0.75 + half, abs=0.012)


def test_it_is_seeded_and_takes_lists():
    hybrid = np.random.default_rng(1).random(7)
    first = spread([1.0] * 7, list(hybrid), seed=3)
    assert first == spread(np.ones(7), hybrid, seed=3)
    assert first != spread(np.ones(7), hybrid, seed=4)


def test_no_interval_where_most_resamples_are_undefined():
    # Only draws of the one sample that the original gets right have a retention: (1 - 11/12)^12 leaves 65% of them.
    assert spread([1.0] + [0.0] * 11, [1.0] * 12) is not None
    undefined = intervals(lambda _: {"r": math.nan}, [1, 2], [1, 2], {"r": False}, resamples=20, seed=0)
    assert undefined == {"r": None}
