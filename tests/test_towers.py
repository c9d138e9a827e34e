"""Models with a tower for images and one for text: one of them, the other, or both together.

The text towers are causal, which the default kernel cannot be.
"""

from __future__ import annotations

import pytest
import torch

import latte_convert
from latte_convert.errors import CheckpointError, DataError, RecipeError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(photos, sentences):
    return {"vision": photos, "text": sentences}


def eligible(report) -> set[str]:
    return {site.tower for site in report.sites if site.eligible}


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_samples_of_one_kind_convert_one_tower(tiny_clip, data, tower, tmp_path):
    result = latte_convert.convert(tiny_clip, data[tower], recipe=Recipe(kernel="latte", samples=6))
    assert eligible(result.report) == {tower}
    assert {site.reason for site in result.report.sites if site.tower != tower} == {
        f"no samples reach the {'text' if tower == 'vision' else 'vision'} tower"
    }
    assert all(name.startswith(f"{tower}.") for name in result.report.fidelity.outputs)
    out = result.save(tmp_path / "hybrid")
    assert latte_convert.verify(out).probe_difference < 1e-5


def test_both_towers_are_scored_and_selected_together(tiny_clip, data, tmp_path):
    result = latte_convert.convert(
        tiny_clip, [data["text"], data["vision"]], recipe=Recipe(kernel="latte", samples=6, ratio=0.5)
    )
    report = result.report
    assert eligible(report) == {"vision", "text"}
    assert len(report.converted) == 3
    robust = sorted((s for s in report.sites if s.eligible), key=lambda site: site.score.value)[:3]
    assert {site.name for site in robust} == set(report.converted)
    assert {name.partition(".")[0] for name in report.fidelity.outputs} == {"vision", "text"}
    worst = min(report.fidelity.outputs[f"{tower}.pooler_output"].cosine for tower in ("vision", "text"))
    assert report.fidelity.outputs[report.fidelity.primary].cosine == worst
    assert report.calibration.modality == "text, image"
    assert (report.calibration.used, report.calibration.held_out) == (8, 4)
    reloaded = latte_convert.load(result.save(tmp_path / "hybrid"))
    batch = {
        "pixel_values": torch.randn(2, 3, 48, 48),
        "input_ids": torch.tensor([[1, 5, 6, 2, 0], [1, 7, 8, 9, 2]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    }
    with torch.no_grad():
        a, b = result.model(**batch), reloaded(**batch)
    assert torch.allclose(a.logits_per_image, b.logits_per_image, atol=1e-5)


def test_a_tower_of_the_recipe(tiny_clip, data):
    report = latte_convert.score(
        tiny_clip, [data["vision"], data["text"]], recipe=Recipe(kernel="latte", samples=4, towers=("text",))
    )
    assert eligible(report) == {"text"}
    with pytest.raises(RecipeError, match="no tower 'visoin' \\(nearest: vision"):
        latte_convert.score(tiny_clip, data["vision"], recipe=Recipe(kernel="latte", samples=4, towers=("visoin",)))


def test_two_sources_of_one_kind_are_refused(tiny_clip, tiny_dino, data):
    with pytest.raises(DataError, match="this model takes text"):
        latte_convert.score(tiny_clip, [data["vision"], data["vision"]], recipe=Recipe(kernel="latte", samples=4))
    with pytest.raises(DataError, match="give one --calib for each, not 2"):
        latte_convert.score(tiny_dino, [data["vision"], data["text"]], recipe=Recipe(kernel="latte", samples=4))


@pytest.mark.parametrize(("model", "tokens"), [("tiny_dino", 1 + 8 * 8), ("tiny_clip", 1 + 14 * 14)])
def test_another_resolution(request, data, model, tokens, tmp_path):
    path = request.getfixturevalue(model)
    result = latte_convert.convert(path, data["vision"], recipe=Recipe(kernel="latte", samples=4, resolution=112))
    converted = {result.report.cost.tokens[name] for name in result.report.converted}
    assert converted == {tokens}
    assert latte_convert.verify(result.save(tmp_path / "hybrid")).probe_difference < 1e-5


def test_resolutions_that_cannot_be(tiny_dino, tiny_clip, data):
    with pytest.raises(CheckpointError, match="not a multiple of the model's patch size 14; nearest: 98"):
        latte_convert.score(tiny_dino, data["vision"], recipe=Recipe(kernel="latte", samples=4, resolution=100))
    with pytest.raises(RecipeError, match="resolution is for images; the samples here are text"):
        latte_convert.score(tiny_clip, data["text"], recipe=Recipe(kernel="latte", samples=4, resolution=64))


def test_another_resolution_with_both_towers(tiny_clip, data):
    report = latte_convert.convert(
        tiny_clip, [data["vision"], data["text"]], recipe=Recipe(kernel="latte", samples=4, resolution=64)
    ).report
    assert eligible(report) == {"vision", "text"}
    assert {report.cost.tokens[s.name] for s in report.sites if s.tower == "vision"} == {1 + 8 * 8}
