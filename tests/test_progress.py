from __future__ import annotations

import io
import sys

import pytest
from report.samples import make_report

from latte_convert.progress import bars, progress_of, silent
from latte_convert.report.summary import summarise


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_true_stands_for_bars_and_a_function_for_itself() -> None:
    def mine(_title: str, _total: int):
        return lambda: None

    assert progress_of(True) is bars
    assert progress_of(False) is silent
    assert progress_of(mine) is mine


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    advance = bars("Calibrating", 3)
    for _ in range(3):
        advance()
    assert ("Calibrating: 100%" in stream.getvalue()) is shown
    assert ("3/3" in stream.getvalue()) is shown


def test_a_report_in_a_few_lines() -> None:
    assert summarise(make_report(cosine=0.99)).splitlines() == [
        "Dinov2Model: 8 of 12 attention sites converted",
        "  fidelity  0.9900 mean cosine of last_hidden_state on 8 held-out samples",
        "  FLOPs     45.0 % of those of exact attention",
        "  speed     1.11x (41.2 → 36.9 ms a held-out sample, 785 tokens, cpu, 2 threads)",
        "  verdict   Worth it if your task holds: 1.12 times faster, outputs very close.",
    ]
    assert repr(make_report()) == str(make_report()) == summarise(make_report())
    assert summarise(make_report(fidelity=False, warnings=["a"])).splitlines() == [
        "Dinov2Model: 8 of 12 attention sites would be converted",
        "  warnings  1, in report.warnings",
    ]
