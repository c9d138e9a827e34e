"""How many pixels an image will have is known before it is resized, for every library's way of resizing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import timm.data
import transformers
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import nn

from latte_convert.checkpoints.hf_inputs import HFProcessor
from latte_convert.data.decode import BadSample
from latte_convert.data.pixels import MOST_PIXELS, pixels_by_size, pixels_by_transforms
from latte_convert.data.samples import Sample

SIZES = [(300, 20), (20, 300), (64, 64)]

RESIZED = {
    "DINOv2": transformers.BitImageProcessor(size={"shortest_edge": 56}, do_center_crop=False),
    "ViT": transformers.ViTImageProcessor(size={"height": 48, "width": 32}),
    "DETR": transformers.DetrImageProcessor(size={"shortest_edge": 80, "longest_edge": 133}, do_pad=False),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processor", RESIZED.values(), ids=RESIZED)
def test_transformers(processor: Any, size: tuple[int, int]) -> None:
    made = processor(images=Image.new("RGB", size), return_tensors="pt")["pixel_values"]
    pixels = made.shape[-2] * made.shape[-1]
    assert pixels_by_size(dict(processor.size), *size) == pytest.approx(pixels, rel=0.15)  # sides are whole


TRANSFORMS = {
    **{f"timm {m}": timm.data.create_transform((3, 56, 56), crop_mode=m) for m in ("center", "squash", "border")},
    "timm 2 to 1": timm.data.create_transform((3, 56, 28), crop_mode="center"),
    **{
        f"open_clip {mode}": image_transform_v2(PreprocessCfg(size=56, resize_mode=mode), is_train=False)
        for mode in ("shortest", "longest", "squash")
    },
    "open_clip 2 to 1": image_transform_v2(PreprocessCfg(size=(56, 28)), is_train=False),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Any, size: tuple[int, int]) -> None:
    step = next(each for each in transform.transforms if "Resize" in type(each).__name__)
    made = step(Image.new("RGB", size))
    assert pixels_by_transforms(transform, *size) == pytest.approx(made.width * made.height, rel=0.15)


def test_sizes_that_count_pixels() -> None:
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # Qwen2-VL
    assert pixels_by_size(size, 640, 480) == 640 * 480
    assert pixels_by_size(size, 10, 10) == 56 * 56
    assert pixels_by_size(size, 8000, 8000) == 28 * 28 * 1280


def test_a_strip_is_refused_before_it_is_resized(tmp_path: Any) -> None:
    RESIZED["DINOv2"].save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["size"] == {"shortest_edge": 56}
    processor = HFProcessor("a model", tmp_path, "image")
    processor.apply = lambda **_: pytest.fail("it was resized")
    processor.apply.size, long = {"shortest_edge": 56}, 10_000_000
    assert long / 8 * 56**2 > MOST_PIXELS
    with pytest.raises(BadSample, match="8 x 10000000 pixels: resized for this model it has 3,920,000,000"):
        processor.prepare(Sample("a.png", "", Image.new("1", (8, long))), nn.Identity())
