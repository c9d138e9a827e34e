"""What is saved is what was converted: a source that changes meanwhile is an error that names the file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import latte_convert
from latte_convert.checkpoints.weights import read_file
from latte_convert.errors import CheckpointError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tiny_dino: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_dino, tmp_path / "model")


def move_weights(source: Path) -> None:
    """By as little as a step of training moves them; the file keeps its size."""
    tensors = load_file(source / "model.safetensors")
    tensors["layernorm.weight"] = tensors["layernorm.weight"] + 1e-4
    save_file(tensors, source / "other.safetensors", metadata={"format": "pt"})
    (source / "other.safetensors").replace(source / "model.safetensors")


def write_over_weights(source: Path) -> None:
    """In place, so that what is memory-mapped changes, too."""
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")


def edit(source: Path) -> None:
    processor = source / "preprocessor_config.json"
    processor.write_text(json.dumps({**json.loads(processor.read_text()), "rescale_factor": 0.5}))


CHANGES = {
    "weights replaced": (move_weights, "model.safetensors was changed"),
    "weights written over": (write_over_weights, "model.safetensors was changed"),
    "a side file edited": (edit, "preprocessor_config.json was changed"),
    "a side file removed": (lambda source: (source / "preprocessor_config.json").unlink(), "preprocessor_config.json"),
    "a side file added": (lambda source: (source / "vocab.txt").write_text("a"), "vocab.txt was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["while it runs", "before it is saved"])
def test_a_source_that_changes_is_an_error(source, photos, tmp_path, change, when):
    act, message = CHANGES[change]
    acted: list[str] = []

    def progress(title: str, _total: int):
        if when == "while it runs" and not acted:
            acted.append(title)
            act(source)
        return lambda: None

    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4), progress=progress)
    if when == "before it is saved":
        act(source)
    with pytest.raises(CheckpointError, match=message):
        result.save(tmp_path / "hybrid")
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing was written"


def test_an_untouched_source_is_recorded_as_it_was_opened(source, photos, tmp_path):
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4))
    manifest = json.loads((result.save(tmp_path / "hybrid") / "latte.json").read_text())
    assert manifest["source"]["sha256"] == result.report.source.sha256
    assert set(manifest["source"]["sha256"]) == {"model.safetensors"}


def test_a_source_that_is_gone_is_no_obstacle(source, photos, tmp_path):
    """What is in memory is written, and proven."""
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4))
    shutil.rmtree(source)
    assert latte_convert.verify(result.save(tmp_path / "hybrid")).probe_difference < 1e-5


def test_a_hole_beside_the_weights_is_refused(source: Path, photos: Path) -> None:
    with (source / "vocab.txt").open("wb") as file:
        file.truncate(100 * 10**9)
    with pytest.raises(CheckpointError, match=r"vocab\.txt has 100,000 MB, too much"):
        latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
def test_weights_are_not_mapped(tmp_path):
    """Whoever looks at a mapped file that was cut short is killed, without a word."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100_000)}, path)
    tensors = read_file(path)
    assert path.name not in Path("/proc/self/maps").read_text()
    os.truncate(path, 10)
    assert tensors["a"].sum() == 100_000


def test_a_hole_of_a_hundred_gigabytes_is_not_hashed(tiny_dino, photos, tmp_path):
    source = shutil.copytree(tiny_dino, tmp_path / "source")
    (source / "model.safetensors").write_bytes(b"")
    os.truncate(source / "model.safetensors", 100 * 10**9)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
