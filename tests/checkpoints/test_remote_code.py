"""No code of a checkpoint runs without the flag, whatever stands on stdin or in its files; with the flag it does."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from open_clip_models import write as write_open_clip

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import CheckpointError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

PROCESSOR = "preprocessor_config.json"
CODE = """
import pathlib
import transformers

pathlib.Path({marker!r}).touch()


class Mine(transformers.{base}):
    pass
"""

NAMED = {"AutoTokenizer": [None, "mine.Mine"]}


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """A file that the code makes when it is imported; whoever asks on the terminal is told yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "it-ran"


def plant(folder: Path, file: str, auto: str, base: str, marker: Path, **more: object) -> None:
    """Let a configuration name a class of its own."""
    (folder / "mine.py").write_text(CODE.format(marker=str(marker), base=base))
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **more, "auto_map": {auto: NAMED.get(auto, "mine.Mine")}}))


def dino(folder: Path, tiny_dino: Path) -> Path:
    shutil.copytree(tiny_dino, folder)
    return folder


@pytest.mark.parametrize(
    ("file", "auto", "base", "more", "use"),
    [
        (PROCESSOR, "AutoImageProcessor", "BitImageProcessor", {"image_processor_type": "Mine"}, "image"),
        (PROCESSOR, "AutoFeatureExtractor", "WhisperFeatureExtractor", {"feature_extractor_type": "Mine"}, "audio"),
        ("tokenizer_config.json", "AutoTokenizer", "PreTrainedTokenizerFast", {"tokenizer_class": "Mine"}, "text"),
        ("config.json", "AutoConfig", "Dinov2Config", {"model_type": "mine"}, "model"),
        ("config.json", "AutoModel", "Dinov2Model", {"architectures": ["Mine"]}, "model"),
    ],
    ids=["image processor", "feature extractor", "tokenizer", "configuration", "model"],
)
def test_code_of_a_transformers_checkpoint(file, auto, base, more, use, tiny_dino, tiny_clip, tmp_path, marker):
    folder = dino(tmp_path / "source", tiny_dino)
    shutil.copy(tiny_clip / "tokenizer.json", folder)
    plant(folder, file, auto, base, marker, **more)
    if use == "audio":
        (folder / file).write_text(json.dumps({**more, "auto_map": {auto: "mine.Mine"}}))

    def load(trusted: bool) -> object:
        found = resolve(folder, trust_remote_code=trusted)
        return found.model_class if use == "model" else type(found.processor(use).apply).__name__

    with pytest.raises(CheckpointError, match=r"--trust-remote-code|no model class 'Mine'"):
        load(False)
    assert not marker.exists()
    if auto == "AutoConfig":
        assert load(True) == "Dinov2Model"
    else:
        assert load(True) == "Mine"
    assert marker.exists()


@pytest.mark.parametrize("kwargs", [{}, {"tokenizer_kwargs": {"trust_remote_code": True}}])
@pytest.mark.parametrize("what", ["tokenizer", "text tower"])
def test_code_that_open_clip_would_load(what, kwargs, tiny_clip, tmp_path, marker):
    folder = write_open_clip(tmp_path / "source")
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    text = config["model_cfg"]["text_cfg"]
    if what == "tokenizer":
        shutil.copy(tiny_clip / "tokenizer.json", folder)
        plant(
            folder, "tokenizer_config.json", "AutoTokenizer", "PreTrainedTokenizerFast", marker, tokenizer_class="Mine"
        )
        text |= {"hf_tokenizer_name": "org/m", **kwargs}
    else:
        tower = tmp_path / "tower"
        tower.mkdir()
        plant(tower, "config.json", "AutoConfig", "BertConfig", marker, model_type="mine")
        text |= {"hf_model_name": str(tower), **kwargs}
    path.write_text(json.dumps(config))
    found = resolve(folder)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        found.processor("text") if what == "tokenizer" else found.instantiate(found.original_tensors())
    assert not marker.exists()
    if what == "tokenizer":
        assert resolve(folder, trust_remote_code=True).processor("text").apply is not None
        assert marker.exists()


@pytest.fixture
def artifacts(tiny_dino, photos, tmp_path, marker) -> tuple[Path, Path]:
    """A hybrid and an adapter of a checkpoint with a processor of its own, whose code has been forgotten since."""
    folder = dino(tmp_path / "source", tiny_dino)
    plant(folder, PROCESSOR, "AutoImageProcessor", "BitImageProcessor", marker, image_processor_type="Mine")
    recipe = Recipe(kernel="latte", samples=4, min_samples=2)
    result = latte_convert.convert(folder, photos, recipe=recipe, trust_remote_code=True, progress=False)
    made = result.save(tmp_path / "hybrid"), result.save(tmp_path / "adapter", adapter=True)
    marker.unlink()
    forget()
    return made


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_of_an_artifact(artifacts, photos, tmp_path, marker, latte, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for i, made in enumerate(artifacts):
        look = ("eval", made, "--task", "fidelity", "--data", photos, "--samples", 2)
        commands = [
            ("inspect", made), ("verify", made), ("report", made, "-o", tmp_path / f"{i}.html"), ("push", made, "a/b"),
            ("restore", made, "--out", tmp_path / f"restored{i}"), ("export", made, "--out", tmp_path / f"onnx{i}"),
            ("bench", made, "--resolutions", "28", "--rounds", 1, "--no-compile"), look,
            ("merge", made, "--out", tmp_path / f"merged{i}"), ("convert", made, "--calib", photos, "--dry-run"),
        ]  # fmt: skip
        for command in commands:
            code, _, said = latte(*command)
            assert code in (0, 2, 3, 5), said
            assert not marker.exists(), command
        code, _, said = latte(*look)
        assert (code, "--trust-remote-code" in said) == (3, True), said
        assert latte(*look, "--trust-remote-code")[0] == 0
        assert marker.exists()
        marker.unlink()
        forget()
