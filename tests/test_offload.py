"""Models larger than memory: a conversion whose weights stay on disk gives what one in memory gives, to the byte."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_processes import figures

import latte_convert
from latte_convert.adapters import offload
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.errors import CheckpointError, OutputError, UsageError
from latte_convert.recipe import Recipe

RECIPE = Recipe(kernel="latte", samples=6)


def sharded(source: Path, path: Path) -> Path:
    """A checkpoint in several files."""
    shutil.copytree(source, path)
    (path / "model.safetensors").unlink()
    model = transformers.Dinov2Model.from_pretrained(source)
    model.save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def mixed(source: Path, path: Path) -> Path:
    """One whose norms are float64: Transformers casts them."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    save_file({key: t.double() if "norm" in key else t for key, t in tensors.items()}, path / "model.safetensors")
    return path


def of_timm(_source: Path, path: Path) -> Path:
    """A ViT of timm."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=5)
    timm.models.save_for_hf(model, path, safe_serialization=True)
    return path


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads a whole checkpoint into memory."""

    def whole(_self: Checkpoint) -> None:
        raise AssertionError("all tensors were read at once")

    monkeypatch.setattr(Checkpoint, "read_tensors", whole)


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (sharded, RECIPE),
        (mixed, RECIPE.model_copy(update={"propagate_error": True})),
        (of_timm, RECIPE.model_copy(update={"resolution": 96})),
    ],
    ids=["sharded", "mixed", "timm"],
)
def test_the_same_artifact_with_and_without(make, recipe, tiny_dino, photos, tmp_path, request):
    model = make(tiny_dino, tmp_path / "model")
    plain = latte_convert.convert(model, photos, recipe=recipe, progress=False).save(tmp_path / "plain")
    pixels = torch.rand(1, 3, 96 if make is of_timm else 56, 96 if make is of_timm else 56)
    request.getfixturevalue("in_blocks")
    result = latte_convert.convert(model, photos, recipe=recipe, offload=tmp_path / "more", progress=False)
    assert sum(parameter.is_meta for parameter in result.model.parameters()) > 20
    out = result.save(tmp_path / "offloaded")
    assert figures(out) == figures(plain)
    (weights,) = (path.name for path in plain.glob("*.safetensors"))
    assert (out / weights).read_bytes() == (plain / weights).read_bytes()
    assert list((tmp_path / "more").iterdir()) == []
    loaded = latte_convert.load(out, offload=tmp_path / "more", verify=False)
    request.getfixturevalue("monkeypatch").undo()
    found, expected = (each(pixels) for each in (loaded, latte_convert.load(plain)))
    if make is not of_timm:
        found, expected = found.last_hidden_state, expected.last_hidden_state
    assert torch.equal(found, expected)


def test_the_command_line_and_what_it_refuses(latte, tiny_dino, tiny_clip, photos, tmp_path, monkeypatch):
    def run(model: Path, place: Path, *more: object) -> tuple[int, str, str]:
        return latte("score", model, "--calib", photos, "--samples", 4, "--kernel", "latte", "--offload", place, *more)

    code, plan, err = run(tiny_dino, tmp_path / "more")
    assert code == 0, err
    assert plan == latte("score", tiny_dino, "--calib", photos, "--samples", 4, "--kernel", "latte")[1]
    (tmp_path / "file").write_text("")
    for model, place, sentence in (
        (tiny_dino, tmp_path / "file", "no weights can be kept in"),
        (mixed(tiny_dino, tmp_path / "mixed"), tmp_path / "full", "has 0 MB free, and 0 MB of weights go there"),
    ):
        free = namedtuple("Free", "free")(17)
        monkeypatch.setattr(offload.shutil, "disk_usage", lambda _, free=free: free)
        code, stdout, stderr = run(model, place)
        assert (code, stdout) == (3, "")
        assert sentence in stderr
        assert "choose another --offload" in stderr.replace("Choose", "choose")
    assert list((tmp_path / "full").iterdir()) == []


def test_models_that_have_no_files_or_are_one_piece(tiny_dino, photos, tmp_path):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    with pytest.raises(UsageError, match="in memory already: to offload it, give its checkpoint's directory"):
        latte_convert.convert(model, [{}], offload=tmp_path)
    torch.save(load_file(tiny_dino / "model.safetensors"), tmp_path / "pytorch_model.bin")
    shutil.copy(tiny_dino / "config.json", tmp_path)
    shutil.copy(tiny_dino / "preprocessor_config.json", tmp_path)
    with pytest.raises(CheckpointError, match="is a pickle, which is read as a whole"):
        latte_convert.score(tmp_path, photos, allow_pickle=True, recipe=RECIPE, offload=tmp_path / "more")


def test_a_disk_that_fills_up_while_weights_are_written(tiny_dino, photos, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutputError, match=r"has no room for 0 MB: .*No space left"):
        offload._written({"weight": torch.ones(2)}, tmp_path)
    assert list(tmp_path.iterdir()) == []
