from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image
from report.samples import make_full, make_report

from latte_convert.errors import InputError
from latte_convert.report.plots import write_plots


def test_every_chart_that_has_numbers(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    paths = write_plots(make_full(), tmp_path, "dino")
    names = ["sensitivity", "blocks", "frontier", "speed", "attention-speed", "memory", "attention-memory", "maps"]
    assert [path.name for path in paths] == [f"dino-{name}.png" for name in names]
    for path in paths:
        image = Image.open(path).convert("L")
        assert image.width >= 1000
        darkest, lightest = image.getextrema()
        assert darkest < 64 < 250 < lightest


def test_a_plain_report_has_two(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    assert [path.stem for path in write_plots(make_report(), tmp_path)] == ["report-sensitivity", "report-blocks"]


def test_without_resvg_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(InputError, match=r"pip install 'latte-convert\[plots\]'"):
        write_plots(make_report(), tmp_path)
