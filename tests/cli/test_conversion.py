"""``latte score`` and ``latte convert``: results, streams, models and data that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


def test_convert_writes_an_artifact_and_prints_its_path(latte, tiny_dino, photos, tmp_path):
    out = tmp_path / "hybrid"
    code, stdout, stderr = latte(
        "convert", tiny_dino, "--calib", photos, "--samples", 4, "--kernel", "latte", "--out", out
    )
    assert (code, stdout) == (0, f"{out}\n")
    assert "\x1b" not in stderr
    assert "█" in stderr
    assert "held-out samples (4 of 6 attention sites converted)" in stderr
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "latte.json",
        "model.safetensors",
        "original",
        "preprocessor_config.json",
        "report.html",
        "report.json",
    ]


def test_json_is_one_document_and_nothing_else(latte, tiny_dino, photos, tmp_path):
    code, stdout, _ = latte(
        "convert",
        tiny_dino,
        "--calib",
        photos,
        "--samples",
        4,
        "--kernel",
        "latte",
        "-k",
        2,
        "--out",
        tmp_path / "o",
        "--json",
    )
    report = json.loads(stdout)
    assert code == 0
    assert len(report["converted"]) == 2
    assert report == json.loads((tmp_path / "o" / "report.json").read_text())


def test_score_prints_the_sites_to_convert_and_writes_no_model(latte, tiny_dino, photos, tmp_path):
    page = tmp_path / "scores.html"
    code, stdout, stderr = latte(
        "score", tiny_dino, "--calib", photos, "--samples", 4, "--kernel", "latte", "--out", page
    )
    assert code == 0
    assert len(stdout.splitlines()) == 4
    assert all(line.startswith("encoder.layer.") for line in stdout.splitlines())
    assert "nothing was converted" in stderr
    assert [p.name for p in tmp_path.iterdir()] == ["scores.html"]


def test_dry_run_writes_nothing(latte, tiny_dino, photos, tmp_path):
    out = tmp_path / "o"
    code, stdout, _ = latte(
        "convert",
        tiny_dino,
        "--calib",
        photos,
        "--samples",
        4,
        "--kernel",
        "latte",
        "--out",
        out,
        "--dry-run",
        "--json",
    )
    assert code == 0
    assert json.loads(stdout)["fidelity"] is None
    assert not list(tmp_path.iterdir())


def bad_models(tmp_path: Path, tiny_dino: Path) -> dict[str, tuple[Path | str, str]]:
    """Checkpoints that cannot be used, and what the message must say."""
    for name in ("empty", "bare", "pickle", "alien", "broken", "text"):
        (tmp_path / name).mkdir()
    config = (tiny_dino / "config.json").read_text()
    for name in ("bare", "pickle", "broken"):
        (tmp_path / name / "config.json").write_text(config)
    shutil.copy(tiny_dino / "preprocessor_config.json", tmp_path / "broken")
    torch.save({}, tmp_path / "pickle" / "pytorch_model.bin")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not safetensors")
    (tmp_path / "alien" / "config.json").write_text('{"model_type": "dinov9"}')
    shutil.copy(tiny_dino / "model.safetensors", tmp_path / "alien")
    transformers.BertModel(
        transformers.BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30
        )
    ).save_pretrained(tmp_path / "text")
    no_processor = tmp_path / "no-processor"
    shutil.copytree(tiny_dino, no_processor, ignore=lambda *_: ["preprocessor_config.json"])
    missing_tensor = tmp_path / "missing-tensor"
    shutil.copytree(tiny_dino, missing_tensor)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_dino / "model.safetensors")
    del tensors["layernorm.weight"]
    save_file(tensors, missing_tensor / "model.safetensors", metadata={"format": "pt"})
    return {
        "absent": (tmp_path / "tiny-dinoo", "there is no model at"),
        "absent relative": ("./nowhere", "there is no model at './nowhere'"),
        "empty directory": (tmp_path / "empty", "has no config.json"),
        "no weights": (tmp_path / "bare", "has no model.safetensors"),
        "pickle only": (tmp_path / "pickle", "--allow-pickle"),
        "unknown type": (tmp_path / "alien", "does not know the model type 'dinov9' (nearest: dinov2"),
        "damaged": (tmp_path / "broken", "is damaged"),
        "no tokenizer": (tmp_path / "text", "has no usable tokenizer"),
        "no processor": (no_processor, "has no usable image processor"),
        "incomplete": (missing_tensor, "1 tensors missing (layernorm.weight)"),
        "not a hub id": ("a b", "neither an existing path nor a Hub id"),
        "offline": ("someone/some-model", "cannot be reached"),
        "unknown timm model": ("timm:vit_small", "has no model 'vit_small' (nearest: vit_small_"),
    }


def test_bad_models(latte, tiny_dino, photos, tmp_path):
    for name, (model, message) in bad_models(tmp_path, tiny_dino).items():
        code, stdout, stderr = latte(
            "convert", model, "--calib", photos, "--samples", 4, "--kernel", "latte", "--out", tmp_path / "o"
        )
        assert code == 3, f"{name}: {stderr}"
        assert stdout == "", name
        assert message in stderr, f"{name}: {stderr}"
        assert "Traceback" not in stderr, name
        assert not (tmp_path / "o").exists(), name


def test_bad_data_is_found_before_the_weights_load(latte, tiny_dino, photos, tmp_path, speech):
    """The weights are those of another model: whoever loads them first would say so."""
    model = shutil.copytree(tiny_dino, tmp_path / "model")
    save_file({"another": torch.zeros(1)}, model / "model.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "a.jpg").write_bytes(b"\xff\xd8\xff not a photo")
    for data, message in (
        (tmp_path / "absent", "absent"),
        (tmp_path / "empty", "empty"),
        (tmp_path / "corrupt", "a.jpg"),
        (speech, "this model takes images"),
    ):
        code, stdout, stderr = latte("convert", model, "--calib", data, "--out", tmp_path / "o")
        assert (code, stdout) == (3, ""), stderr
        assert message in stderr
        assert "damaged" not in stderr
    code, stdout, stderr = latte("convert", model, "--calib", photos, "--out", tmp_path / "o")
    assert (code, stdout) == (3, "")
    assert "model.safetensors" in stderr or "tensor" in stderr


def test_skipped_files_are_named_and_counted(latte, tiny_dino, photos, tmp_path):
    dirty = shutil.copytree(photos, tmp_path / "dirty")
    (dirty / "broken.JPG").write_bytes(b"")
    (dirty / ".DS_Store").write_bytes(b"x")
    code, _, stderr = latte(
        "convert", tiny_dino, "--calib", dirty, "--samples", 20, "--kernel", "latte", "--out", tmp_path / "o"
    )
    assert code == 0
    assert "20 asked, 6 fitted, 2 held out, 1 skipped" in stderr
    skipped = json.loads((tmp_path / "o" / "report.json").read_text())["calibration"]["skipped"]
    assert [s["id"] for s in skipped] == ["broken.JPG"]
    code, _, stderr = latte(
        "convert",
        tiny_dino,
        "--calib",
        dirty,
        "--samples",
        20,
        "--kernel",
        "latte",
        "--strict",
        "--out",
        tmp_path / "p",
    )
    assert code == 3
    assert "broken.JPG" in stderr


def test_pickle_is_read_on_request_and_weights_only(latte, tiny_dino, photos, tmp_path):
    from safetensors.torch import load_file

    model = shutil.copytree(tiny_dino, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    arguments = ("convert", model, "--calib", photos, "--samples", 4, "--kernel", "latte", "--allow-pickle", "--out")
    assert latte(*arguments, tmp_path / "o")[0] == 0
    back = load_file(tmp_path / "o" / "model.safetensors")
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"x": Evil()}, model / "pytorch_model.bin")
    code, _, stderr = latte(*arguments, tmp_path / "p")
    assert code == 3
    assert "weights-only" in stderr
    assert not (tmp_path / "pwned").exists()


def test_existing_output_is_refused_before_the_work(latte, tiny_dino, photos, tmp_path):
    """The weights are those of another model: whoever loads them first would say so."""
    model = shutil.copytree(tiny_dino, tmp_path / "model")
    save_file({"another": torch.zeros(1)}, model / "model.safetensors")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine.txt").write_text("keep")
    code, stdout, stderr = latte("convert", model, "--calib", photos, "--out", tmp_path / "o")
    assert (code, stdout) == (3, "")
    assert "--overwrite" in stderr
    assert (tmp_path / "o" / "mine.txt").read_text() == "keep"


def test_offline_opens_no_socket(tiny_dino, photos, tmp_path):
    """The whole conversion with sockets removed from Python."""
    code = (
        "import socket, sys\n"
        "def no(*a, **k): raise RuntimeError('a socket was opened')\n"
        "socket.socket.connect = no; socket.create_connection = no; socket.getaddrinfo = no\n"
        f"sys.argv = ['latte', 'convert', {str(tiny_dino)!r}, '--calib', {str(photos)!r}, '--samples', '4',\n"
        f"            '--kernel', 'latte', '--out', {str(tmp_path / 'o')!r}]\n"
        "from latte_convert.cli.app import main; main()"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "latte.json").is_file()
