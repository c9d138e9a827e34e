"""Samples as open_clip's own transform and tokenizer prepare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip_models import write
from PIL import Image

from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.samples import Sample
from latte_convert.errors import CheckpointError


@pytest.mark.parametrize("modality", ["image", "text"])
def test_preprocessing_is_open_clips_own(modality: Any, tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source")
    model, transform = open_clip.create_model_from_pretrained(f"local-dir:{source}")
    processor: Any = resolve(source).processor(modality)
    if modality == "image":
        value: Any = Image.open(photos / "cat.jpg").convert("RGB")
        batch, expected = processor.prepare(Sample("a", "", value), model), {"image": transform(value)[None]}
        assert expected["image"].shape == (1, 3, 32, 32)
    else:
        value = "Two dogs."
        tokenizer = open_clip.get_tokenizer(f"local-dir:{source}")
        batch, expected = processor.prepare(Sample("a", "", value), model), {"text": tokenizer(value)}
        assert expected["text"].shape == (1, 16)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], value) for key, value in expected.items())
    assert processor.method(model) == f"encode_{modality}"
    with pytest.raises(CheckpointError, match="takes images and texts, no audio"):
        resolve(source).processor("audio")


def test_cut_texts_are_counted(tmp_path: Path) -> None:
    checkpoint = resolve(write(tmp_path / "source"))
    model, _ = checkpoint.instantiate(checkpoint.read_tensors())
    processor = checkpoint.processor("text")
    for name, words in (("short", 14), ("long", 15)):  # and two tokens around them
        processor.prepare(Sample(name, "", " ".join(["dog"] * words)), model)
    assert processor.truncated == {"long"}


def test_a_coca_takes_its_images_by_another_name(tmp_path: Path) -> None:
    checkpoint = resolve(write(tmp_path / "source", "coca"))
    model, _ = checkpoint.instantiate(checkpoint.read_tensors())
    batch = checkpoint.processor("image").prepare(Sample("a", "", Image.new("RGB", (40, 50))), model)
    assert list(batch) == ["images"]
