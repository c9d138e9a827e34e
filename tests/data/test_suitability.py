"""Inputs that do not look like what a model was trained on are named."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image

from latte_convert.data.suitability import Suitability


def warnings(batches, unknown=None):
    seen = Suitability(unknown)
    for batch in batches:
        seen.add(batch)
    return list(seen.warnings())


@pytest.fixture
def pixels(photos):
    images = [Image.open(path).convert("RGB").resize((56, 56)) for path in photos.glob("*.jpg")]
    return [torch.tensor(np.array(image)).permute(2, 0, 1)[None].float() / 255 for image in images]


def test_photographs_as_a_processor_makes_them(pixels):
    assert warnings({"pixel_values": (x - 0.45) / 0.225} for x in pixels) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 255, "not normalised as image models expect.* mean [0-9]+"),
        (lambda x: torch.rand_like(x) * 4 - 2, "look like noise: .* correlation of (-?0.0[0-9]),"),
        (lambda x: torch.full_like(x, 0.3), "of one colour"),
    ],
)
def test_other_pixels(pixels, change, message):
    torch.manual_seed(0)
    (found,) = warnings({"pixel_values": change(x)} for x in pixels)
    assert re.search(message, found), found


@pytest.mark.parametrize("change", [lambda x: (x * 255).byte(), lambda x: (255 * x)[:, None].expand(1, 4, -1, -1, -1)])
def test_whole_numbers_and_videos_are_looked_at(pixels, change):
    (found,) = warnings({"pixel_values": change(x)} for x in pixels)
    assert "not normalised" in found


def test_silence_and_a_foreign_language():
    assert "silent" in warnings([{"input_values": torch.zeros(1, 400)}] * 3)[0]
    assert warnings([{"input_values": torch.rand(1, 400)}] * 3) == []
    ids = torch.tensor([[1, 0, 0, 5, 2]])
    assert "40% of the tokens are unknown" in warnings([{"input_ids": ids}], unknown=0)[0]
    assert warnings([{"input_ids": ids}], unknown=7) == []
    assert warnings([{"input_ids": ids}]) == []
