"""Transformers alone warns that a hybrid's attention is exact, and is kept from nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import latte_convert
from latte_convert.artifact.results import sha256_file
from latte_convert.checkpoints.mark import METHOD

pytestmark = pytest.mark.slow

ALONE = """
import sys
import torch, transformers

model = transformers.AutoModel.from_pretrained(sys.argv[1])
assert "latte_convert" not in sys.modules
pixels = torch.randn(1, 3, 56, 56)
with torch.no_grad():
    model(pixels)
    half = model.half().to("cpu", torch.float16).float().train().eval()
    half(pixels)
model.save_pretrained(sys.argv[2])
pipe = transformers.pipeline("image-feature-extraction", model=sys.argv[1])
print(type(model).__name__)
"""


def test_transformers_alone_warns_and_is_kept_from_nothing(saved: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(saved), str(tmp_path / "plain")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Dinov2Model\n"
    assert METHOD in done.stderr
    # What it saves is marked still, although it is no artifact: that is said, and it loads as what it is.
    model = transformers.AutoModel.from_pretrained(tmp_path / "plain")
    assert not latte_convert.is_hybrid(model)


def test_with_latte_convert_nothing_warns(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers.utils.logging.enable_propagation()
    try:
        model = transformers.AutoModel.from_pretrained(saved)
        assert latte_convert.is_hybrid(model)
        assert not hasattr(model.config, "quantization_config")
        latte_convert.load(saved)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "quantization" not in caplog.text


def test_the_sources_configuration_comes_back_byte_for_byte(saved: Path, tiny_dino: Path, tmp_path: Path) -> None:
    before = (tiny_dino / "config.json").read_bytes()
    assert (saved / "original" / "config.json").read_bytes() == before
    added = json.loads((saved / "config.json").read_text())
    assert added.pop("quantization_config") == {"quant_method": METHOD}
    assert added == json.loads(before)
    again = latte_convert.save(latte_convert.load(saved), tmp_path / "again")
    for artifact in (saved, again):
        original = latte_convert.restore(artifact, tmp_path / f"original of {artifact.name}")
        assert {path.name: path.read_bytes() for path in original.iterdir()} == {
            path.name: path.read_bytes() for path in tiny_dino.iterdir()
        }
    assert (again / "config.json").read_bytes() == (saved / "config.json").read_bytes()


def test_an_artifact_of_an_older_version(artifact: Path, tiny_dino: Path, tmp_path: Path) -> None:
    """It has no mark, and its README is the source's."""
    shutil.rmtree(artifact / "original")
    shutil.copy(tiny_dino / "config.json", artifact)
    (artifact / "README.md").write_text("theirs")
    manifest = json.loads((artifact / "latte.json").read_text())
    del manifest["files"]["original/config.json"], manifest["results"]["README.md"]
    manifest["files"] |= {name: sha256_file(artifact / name) for name in ("config.json", "README.md")}
    (artifact / "latte.json").write_text(json.dumps(manifest))
    assert latte_convert.verify(artifact).probe_difference < 1e-6
    original = latte_convert.restore(artifact, tmp_path / "original")
    assert (original / "config.json").read_bytes() == (tiny_dino / "config.json").read_bytes()
    assert (original / "README.md").read_text() == "theirs"
    assert latte_convert.is_hybrid(transformers.AutoModel.from_pretrained(artifact, dtype=torch.float16))
