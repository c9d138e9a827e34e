"""timm's and open_clip's own writing of a hybrid gives an artifact; their uploading names what does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from open_clip_models import write

import latte_convert
from latte_convert.errors import CheckpointError
from latte_convert.recipe import Recipe


@pytest.fixture(scope="module")
def vit() -> Any:
    model = timm.create_model("test_vit", pretrained=False, img_size=64)
    batches = [{"x": torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(i))} for i in range(4)]
    return latte_convert.convert(model, batches, recipe=Recipe(kernel="latte", min_samples=2), progress=False).model


def test_timm_writes_the_hybrid(vit: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        vit.norm.weight.add_(0.5)
        expected = vit(torch.ones(1, 3, 64, 64))
    timm.models.save_for_hf(vit, str(tmp_path / "new" / "hybrid"), safe_serialization=True)
    timm.models.save_for_hf(vit, save_directory=tmp_path / "another")
    for path in (tmp_path / "new" / "hybrid", tmp_path / "another"):
        assert torch.equal(latte_convert.load(path, verify=True)(torch.ones(1, 3, 64, 64)), expected)


def test_open_clip_writes_the_hybrid(photos: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    recipe = Recipe(kernel="latte", samples=6, ratio=0.5)
    model: Any = latte_convert.convert(source, photos, recipe=recipe, progress=False).model
    home: Any = sys.modules["open_clip.push_to_hf_hub"]  # of this name the package has a function
    home.save_for_hf(model, None, {}, tmp_path / "hybrid")
    again: Any = latte_convert.load(tmp_path / "hybrid", verify=True)
    image = torch.ones(1, 3, *model.visual.image_size)
    assert torch.equal(again.encode_image(image), model.encode_image(image))
    with pytest.raises(CheckpointError, match=r"latte_convert\.push"):
        open_clip.push_to_hf_hub(model, None, {}, "me/it")


def test_uploading_names_what_does(vit: Any) -> None:
    for push in (timm.models.push_to_hf_hub, timm.models._hub.push_to_hf_hub):
        with pytest.raises(CheckpointError, match=r"latte_convert\.push"):
            push(vit, "me/it")


def test_originals_are_written_as_ever(tmp_path: Path) -> None:
    timm.models.save_for_hf(timm.create_model("test_vit", pretrained=False, img_size=64), str(tmp_path / "plain"))
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["config.json", "pytorch_model.bin"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["timm", "latte_convert"])
def test_the_doors_are_open_whichever_is_imported_first(first: str) -> None:
    second = {"timm": "latte_convert", "latte_convert": "timm"}[first]
    code = (
        f"import {first}\nimport {second}\nimport timm, timm.models._hub as hub\n"
        "assert hub.save_for_hf.__wrapped__ and timm.models.save_for_hf is hub.save_for_hf"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
