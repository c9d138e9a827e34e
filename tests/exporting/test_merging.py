"""Artifacts that merge tokens as graphs, alone and with a kernel that takes merged tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import latte_convert
from latte_convert.attention import CallShape
from latte_convert.exporting.check import Difference, differences
from latte_convert.exporting.formats import FORMATS
from latte_convert.exporting.graph import capture
from latte_convert.exporting.parts import Size, make_parts
from latte_convert.exporting.subject import open_subject

BLOCKS: dict[str, object] = {
    "kernel": "blocks",
    "options": {"window": 8, "region": 16, "blocks": 4, "opened": 1},
    "ratio": 1.0,
    "resolution": 112,
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"ratio": 0}, BLOCKS], ids=["exact", "blocks"])
def test_merged_tokens_in_every_format(settings, dino: Path, photos: Path, tmp_path: Path, caplog) -> None:
    recipe = latte_convert.Recipe(samples=4, merge=0.5, **settings)
    saved = latte_convert.convert(dino, photos, recipe=recipe, progress=False).save(tmp_path / "merged")
    subject = open_subject(saved)
    (part,) = make_parts(subject, [], Size())
    assert "merging groups the tokens" in caplog.text
    side = settings.get("resolution", 56)
    for name, kernel in subject.kernels.items():
        assert not kernel.is_softmax(kernel.inner(CallShape(99, 99, kernel.heads, kernel.head_dim, kernel.head_dim))), (
            name
        )
    pixels = torch.randn(1, 3, side, side)
    exact = open_subject(dino, resolution=side).model(pixels).last_hidden_state
    assert not torch.allclose(part(pixel_values=pixels)[0], exact, atol=1e-3)
    program = capture(part)
    for name, form in FORMATS.items():
        file = tmp_path / name
        form().write(program, part, file)
        assert max(each.value for each in differences(part, form().open(file, part))) < 1e-4, name


@pytest.mark.parametrize(
    ("mean", "rounding", "close"),
    [(1e-2, None, False), (1e-2, 6e-3, True), (1e-2, 4e-3, False), (float("inf"), 1, False)],
)
def test_what_rounding_does_to_a_hybrid_bounds_its_file(mean, rounding, close):
    assert Difference("out", 1, "56x56", 10 * mean, mean, rounding).close is close


@pytest.mark.slow
def test_rounding_is_looked_at_where_a_file_is_off(dino: Path):
    (part,) = make_parts(open_subject(dino), [], Size())
    exact = differences(part, lambda inputs: part(**inputs))
    assert {(each.value, each.rounding) for each in exact} == {(0.0, None)}
    off = differences(part, lambda inputs: tuple(1.01 * output for output in part(**inputs)))
    assert all(each.mean == pytest.approx(0.01, rel=1e-3) and 0 < each.rounding < 1e-4 for each in off)
    assert not any(each.close for each in off)
