from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latte_convert.wording import percent_down, printable, rounded_down, some


def test_some():
    assert some([]) == ""
    assert some("abc") == "a, b, c"
    assert some("abcd") == "a, b, c, …"
    assert some(iter([1, 2]), 1, "; ") == "1; …"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1.0000"), (0.99999999, "0.9999"), (0.57, "0.5700"), (-0.00001, "-0.0001"), (2.5e-9, "0.0000")],
)
def test_rounded_down(value, text):
    assert rounded_down(value) == text


def test_percent_down():
    assert [percent_down(share) for share in (1, 0.57, 0.999999, 0.0, 1.2345678)] == [
        "100.00%", "57.00%", "99.99%", "0.00%", "123.45%",
    ]  # fmt: skip


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
def test_never_higher_and_never_a_digit_lower(value, digits):
    shown = float(rounded_down(value, digits))
    assert value - 10.0**-digits - 1e-9 <= shown <= value + 1e-9


def test_not_finite():
    assert [rounded_down(value) for value in (math.nan, math.inf)] == ["nan", "inf"]


def test_a_terminal_takes_no_command_from_a_name():
    assert printable("plain") == "plain"
    assert printable("grün 日本\tx\ny") == "grün 日本\tx\ny"
    assert printable("\x1b[2Ja\r\x07\x9b1m\u202egpj.\udcff") == r"\x1b[2Ja\r\x07\x9b1m\u202egpj.\udcff"
