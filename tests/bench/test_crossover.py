"""The arithmetic of the crossover, and what is said of it."""

from __future__ import annotations

import pytest

from latte_convert.bench.crossover import Pace, find_crossover, statements
from latte_convert.bench.result import Crossover, Guard, LengthResult, Timing, VariantResult


def timing(ratio: float, spread: float = 0.0) -> Timing:
    return Timing(median_ms=100 * ratio, lower_ms=100 * (ratio - spread), upper_ms=100 * (ratio + spread), rounds=9)


def length(
    tokens: int, hybrid: float, cosine: float = 0.9, spread: float = 0.0, **rivals: tuple[float, float]
) -> LengthResult:
    variants = [
        VariantResult(name="original", forward=timing(1, spread), forward_ratio=1.0),
        VariantResult(name="hybrid", forward=timing(hybrid, spread), forward_ratio=hybrid, cosine=cosine),
        *(VariantResult(name=name, forward_ratio=ratio, cosine=close) for name, (ratio, close) in rivals.items()),
    ]
    return LengthResult(label=f"{tokens} tokens", resolution=None, tokens=tokens, sites=2, variants=variants)


@pytest.mark.parametrize(
    ("points", "tokens", "bracketed"),
    [
        # Twice as slow at 100 and twice as fast at 400: on logarithms, half way is 200.
        ([(100, 2.0), (400, 0.5), (800, 0.4)], 200, True),
        # A power law, ratio = (300 / N)^0.7, is met exactly at any two points of it.
        ([(n, (300 / n) ** 0.7) for n in (65, 257, 1025)], 300, True),
        ([(800, 0.4), (400, 0.5), (100, 2.0)], 200, True),
        ([(100, 0.9), (400, 0.5), (800, 0.4)], 100, False),
        ([(100, 0.9), (400, 1.2), (800, 1.3)], None, False),
        # Two lengths and fewer tell nothing.
        ([(100, 2.0), (400, 0.5)], None, False),
        ([], None, False),
        # Faster, slower, faster: it counts from where it stays faster.
        ([(50, 0.8), (100, 2.0), (400, 0.5)], 200, True),
        # Just as slow at 100: the exact branch still runs there, not from 101 on.
        ([(50, 2.0), (100, 1.0), (400, 0.5)], 101, True),
        ([(50, 3.0), (100, 2.0), (101, 0.999999)], 101, True),
        # What may be as fast is not faster; between it and the next nothing is known.
        ([(100, 2.0), (200, 0.97, False), (400, 0.5)], 400, True),
        ([(100, 2.0), (200, 1.1, False), (400, 0.5)], 400, True),
        ([(100, 0.5), (200, 0.5), (400, 0.9, False)], None, False),
    ],
)
def test_crossover(points, tokens, bracketed):
    assert find_crossover([Pace(*point) for point in points]) == Crossover(tokens=tokens, bracketed=bracketed)


def test_statements_do_not_hide_where_it_is_slower():
    lengths = [length(100, 2.0), length(400, 0.5)]
    said = statements(
        lengths, Crossover(tokens=200, bracketed=True), [Guard(tokens=100, forward_ratio=1.01, identical=True)]
    )
    assert said == [
        "not faster than exact below 200 tokens; faster from there on",
        "at 400 tokens: 0.50 of exact attention's time end to end",
        "below min_tokens, at 100 tokens: bit-identical to the original, 1.01 of its time",
    ]


def test_statements_without_a_crossover():
    said = statements([length(100, 2.0), length(400, 1.25)], Crossover(tokens=None, bracketed=False), [])
    assert said == [
        "slower than exact at 400 tokens, the longest measured (1.25 of its time)",
        "from which length on it is faster takes 3 lengths to say",
    ]


@pytest.mark.parametrize(("spread", "word"), [(0.01, "faster than"), (0.2, "as fast as")])
def test_a_difference_within_the_spread_is_none(spread, word):
    said = statements(
        [length(n, 0.9, spread=spread) for n in (100, 200, 400)], Crossover(tokens=None, bracketed=False), []
    )
    assert said == [f"{word} exact at 400 tokens, the longest measured (0.90 of its time)"]


def test_statements_of_a_hybrid_that_is_never_slower():
    said = statements([length(100, 0.9)], Crossover(tokens=100, bracketed=False), [])
    assert said[0] == "faster than exact from 100 tokens on; nothing shorter was measured"


def test_a_guard_that_fails_is_said():
    guard = [Guard(tokens=100, forward_ratio=1.05, identical=False)]
    said = statements([length(400, 0.5)], Crossover(tokens=400, bracketed=False), guard)
    assert "NOT identical" in said[-1]
    assert "more than 3% slower" in said[-1]


def test_a_rival_that_is_better_is_named():
    lengths = [
        length(100, 0.9, cosine=0.9, pooled=(0.8, 0.95), merged=(0.9, 0.5)),
        length(400, 0.5, pooled=(0.6, 0.99)),
    ]
    said = statements(lengths, Crossover(tokens=100, bracketed=False), [])
    assert [line for line in said if "closer" in line] == [
        "at 100 tokens pooling keys and values is as fast and closer to the original"
    ]
