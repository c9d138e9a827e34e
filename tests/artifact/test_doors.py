"""Transformers' own loading and saving give the hybrid, or say what would be lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import latte_convert
from latte_convert.errors import CheckpointError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

PIXELS = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def saved(tiny_dino: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
    return result.save(tmp_path_factory.mktemp("saved") / "hybrid")


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PIXELS).last_hidden_state


def test_from_pretrained_gives_the_hybrid(saved: Path, tiny_dino: Path, tmp_path: Path) -> None:
    expected = answer(latte_convert.load(saved))
    original = transformers.AutoModel.from_pretrained(tiny_dino)
    assert not latte_convert.is_hybrid(original)
    assert not torch.allclose(answer(original), expected, atol=1e-3)
    model = transformers.AutoModel.from_pretrained(saved)
    assert torch.equal(answer(model), expected)
    assert latte_convert.verify(latte_convert.save(model, tmp_path / "again")).probe_difference < 1e-6
    with_info, info = transformers.Dinov2Model.from_pretrained(str(saved), output_loading_info=True)
    assert torch.equal(answer(with_info), expected)
    assert not info["missing_keys"]
    half = transformers.AutoModel.from_pretrained(saved, dtype=torch.float16)
    assert latte_convert.is_hybrid(half)
    assert half.dtype == torch.float16


def test_a_head_more_than_what_was_saved(saved: Path) -> None:
    model = transformers.Dinov2ForImageClassification.from_pretrained(saved)
    assert torch.equal(answer(model.dinov2), answer(latte_convert.load(saved)))


def test_a_pipeline_runs_the_hybrid(saved: Path) -> None:
    pipe = transformers.pipeline("image-feature-extraction", model=str(saved))
    assert latte_convert.is_hybrid(pipe.model)


def test_save_pretrained_writes_an_artifact(saved: Path, tmp_path: Path) -> None:
    model = latte_convert.load(saved)
    with torch.no_grad():
        model.layernorm.weight.add_(0.5)
    model.save_pretrained(tmp_path / "new")
    assert latte_convert.verify(tmp_path / "new").probe_difference < 1e-6
    busy = tmp_path / "busy"
    (busy / "checkpoint-1").mkdir(parents=True)
    (busy / "training_args.bin").write_text("theirs")
    model.save_pretrained(busy)
    assert (busy / "training_args.bin").read_text() == "theirs"
    assert torch.equal(answer(latte_convert.load(busy)), answer(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "new"]
    for push in (lambda: model.push_to_hub("me/it"), lambda: model.save_pretrained(tmp_path / "x", push_to_hub=True)):
        with pytest.raises(CheckpointError, match=r"latte_convert\.save"):
            push()
    assert not (tmp_path / "x").exists()


def test_originals_are_saved_as_ever(tiny_dino: Path, tmp_path: Path) -> None:
    transformers.AutoModel.from_pretrained(tiny_dino).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "latte.json").exists()
    assert transformers.AutoModel.from_pretrained(tmp_path / "plain").config.hidden_size == 48


@pytest.mark.parametrize("first", ["latte_convert", "transformers.modeling_utils"])
def test_in_either_order_of_imports(saved: Path, first: str) -> None:
    second = {"latte_convert": "transformers.modeling_utils"}.get(first, "latte_convert")
    code = (
        f"import {first}, {second}, sys, transformers, latte_convert\n"
        f"assert latte_convert.is_hybrid(transformers.AutoModel.from_pretrained({str(saved)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_importing_us_imports_nothing_heavy() -> None:
    code = "import latte_convert, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
