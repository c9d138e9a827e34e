"""Adapters hold what was converted and point to their base; merged, they are what a direct conversion writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import latte_convert
from latte_convert.errors import CheckpointError, IntegrityError, UsageError
from latte_convert.recipe import Recipe
from latte_convert.report.merge import merge

pytestmark = pytest.mark.slow

PIXELS = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=["latte", "near_far"])
def made(request: Any, tiny_dino: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A conversion saved whole, and as an adapter; near_far has no tensors of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    source = shutil.copytree(tiny_dino, folder / "source")
    options = {"window": 2, "halo": 0, "clusters": 4} if request.param == "near_far" else {}
    recipe = Recipe(kernel=request.param, options=options, samples=4, ratio=0.5)
    result = latte_convert.convert(source, photos, recipe=recipe, progress=False)
    return result.save(folder / "whole"), result.save(folder / "adapter", adapter=True)


@pytest.fixture
def adapter(made: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of an adapter, whose base is a copy of its own."""
    copy = shutil.copytree(made[1], tmp_path / "adapter")
    base = shutil.copytree(made[1].parent / "source", tmp_path / "base")
    text = (copy / "latte.json").read_text()
    (copy / "latte.json").write_text(text.replace(str(made[1].parent / "source"), str(base)))
    return copy


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PIXELS).last_hidden_state


def test_it_holds_only_what_was_converted(made: tuple[Path, Path]) -> None:
    whole, adapter = made
    names = {path.name for path in adapter.iterdir()}
    assert names - {"adapter.safetensors"} == {"latte.json", "report.json", "report.html", "README.md"}
    tensors = adapter / "adapter.safetensors"
    assert not tensors.exists() or tensors.stat().st_size < (whole / "model.safetensors").stat().st_size / 5


def test_it_loads_verifies_and_restores(made: tuple[Path, Path], tmp_path: Path) -> None:
    whole, adapter = made
    assert torch.equal(answer(latte_convert.load(adapter)), answer(latte_convert.load(whole)))
    assert torch.equal(answer(latte_convert.load(adapter, verify=True)), answer(latte_convert.load(whole)))
    assert latte_convert.verify(adapter) == latte_convert.verify(whole).__class__(
        **{**vars(latte_convert.verify(whole)), "files": len(json.loads((adapter / "latte.json").read_text())["files"])}
    )
    restored = latte_convert.restore(adapter, tmp_path / "original")
    source = adapter.parent / "source"
    assert {p.name: p.read_bytes() for p in restored.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}


def test_merged_it_is_a_direct_conversion(made: tuple[Path, Path], latte: Any, tmp_path: Path) -> None:
    whole, adapter = made
    code, stdout, stderr = latte("merge", adapter, "--out", tmp_path / "whole")
    assert (code, stdout) == (0, f"{tmp_path / 'whole'}\n"), stderr
    for path in whole.iterdir():
        if path.is_file() and path.name != "report.html":
            assert (tmp_path / "whole" / path.name).read_bytes() == path.read_bytes(), path.name
    latte_convert.verify(tmp_path / "whole")
    again = latte_convert.save(latte_convert.load(adapter), tmp_path / "by hand")
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_commands_take_it(adapter: Path, photos: Path, latte: Any, tmp_path: Path) -> None:
    for arguments in (
        ("verify", adapter),
        ("eval", adapter, "--task", "fidelity", "--data", photos, "--samples", 4, "--out", adapter / "eval-f.json"),
        ("bench", adapter, "--resolutions", 56, "--rounds", 2, "--no-compile", "--save"),
        ("report", adapter),
        ("verify", adapter),
    ):
        code, _, stderr = latte(*arguments)
        assert code == 0, (arguments, stderr)
    shutil.rmtree(adapter.parent / "base")
    code, stdout, stderr = latte("inspect", adapter)  # reads no base
    assert code == 0, stderr
    assert "adapter      of the source" in stdout


def test_the_base_is_gone(adapter: Path, latte: Any, tmp_path: Path) -> None:
    moved = (adapter.parent / "base").rename(adapter.parent / "moved")
    for arguments in (("verify", adapter), ("merge", adapter, "--out", tmp_path / "out")):
        code, _, stderr = latte(*arguments)
        assert code == 3
        assert "the base of the adapter" in stderr
        assert "latte merge ADAPTER --base MODEL" in stderr
    assert not (tmp_path / "out").exists()
    assert latte_convert.is_hybrid(latte_convert.load(adapter, base=moved))
    code, _, stderr = latte("merge", adapter, "--out", tmp_path / "out", "--base", moved)
    assert code == 0, stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "preprocessor_config.json"])
def test_the_base_has_changed(name: str, adapter: Path, tiny_clip: Path) -> None:
    file = adapter.parent / "base" / name
    if name == "model.safetensors":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file.write_text(file.read_text() + "\n")
    with pytest.raises(IntegrityError, match=f"has changed: its {name} is not what was converted"):
        latte_convert.load(adapter)
    with pytest.raises(IntegrityError, match="is not what was converted"):
        latte_convert.load(adapter, base=tiny_clip)


def test_what_no_adapter_can_be_made_of(made: tuple[Path, Path], photos: Path, latte: Any, tmp_path: Path) -> None:
    model = latte_convert.load(made[0])
    with torch.no_grad():
        model.layernorm.weight.add_(0.5)
    with pytest.raises(CheckpointError, match="An adapter has no place for weights that are not the source's"):
        latte_convert.save(model, tmp_path / "trained", adapter=True)
    original = latte_convert.restore(made[0], tmp_path / "original")
    import transformers

    memory = transformers.AutoModel.from_pretrained(original)
    batches = [{"pixel_values": torch.randn(1, 3, 56, 56)} for _ in range(4)]
    result = latte_convert.convert(memory, batches, recipe=Recipe(kernel="latte", min_samples=2), progress=False)
    with pytest.raises(CheckpointError, match="points to the checkpoint that it belongs to"):
        result.save(tmp_path / "memory", adapter=True)
    with pytest.raises(UsageError, match="is whole already"):
        merge(made[0], tmp_path / "merged")
    with pytest.raises(UsageError, match="is no adapter"):
        latte_convert.load(made[0], base=original)
    with pytest.raises(CheckpointError, match="latte merge"):
        latte_convert.convert(made[1], photos, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original"]
