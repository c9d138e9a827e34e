"""Models come from the Hub: a stand-in on this machine answers as the Hub does, and fails as it may."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub import PAUSE, TOKEN, Hub, hub

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import CheckpointError
from latte_convert.recipe import Recipe

REPO = "them/model"


@pytest.fixture
def server(tiny_dino: Path) -> Iterator[Hub]:
    with hub() as running:
        running.repos[REPO] = {path.name: path.read_bytes() for path in tiny_dino.iterdir()}
        yield running


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, server: Hub, tmp_path: Path) -> Callable[[str, object], None]:
    """Sets what the Hub's client has read from the environment when it was imported."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    def change(name: str, value: object) -> None:
        monkeypatch.setattr(constants, name, value)

    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    close_session()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: os.environ.get("HF_TOKEN"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    change("HF_HUB_OFFLINE", False)
    change("ENDPOINT", server.endpoint)
    change("HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    change("HF_HUB_CACHE", str(tmp_path / "cache"))
    return change


def refused(revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as raised:
        resolve(REPO, revision=revision)
    return str(raised.value)


def test_the_first_time_by_network_then_without(server, settings, photos, tmp_path, monkeypatch):
    commit = server.commit(REPO)
    recipe = Recipe(kernel="latte", samples=4)
    first = latte_convert.convert(REPO, photos, recipe=recipe, progress=False)
    out = first.save(tmp_path / "hybrid")
    assert json.loads((out / "latte.json").read_text())["source"]["revision"] == commit
    fetched = [line for line in server.seen if line.startswith("GET") and "/resolve/" in line]
    assert sorted(line.rpartition("/")[2] for line in fetched) == sorted(server.repos[REPO])
    server.seen.clear()
    resolve(REPO)
    assert not [line for line in server.seen if line.startswith("GET") and "/resolve/" in line]

    def no(*_: object) -> None:
        raise AssertionError("a socket was opened")

    settings("HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", no)
    again = latte_convert.convert(REPO, photos, recipe=recipe, progress=False)
    assert again.task.source.revision == commit
    again.save(tmp_path / "again")
    weights = [(place / "model.safetensors").read_bytes() for place in (out, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_a_revision_is_pinned(server):
    first = server.commit(REPO)
    changed = json.loads(server.repos[REPO]["config.json"])
    server.repos[REPO]["config.json"] = json.dumps({**changed, "layer_norm_eps": 1e-5}).encode()
    second = server.commit(REPO)
    assert resolve(REPO).revision == second
    pinned = resolve(REPO, revision=first)
    assert (pinned.revision, pinned.config) == (first, changed)
    assert "has no such revision" in refused("v9")


def test_a_download_that_breaks_is_taken_up_where_it_was(server, settings, tiny_dino):
    settings("DOWNLOAD_CHUNK_SIZE", 1 << 14)  # of bytes that are kept at once
    server.faults["model.safetensors"] = ["cut", "cut"]
    found = resolve(REPO)
    assert found.weights[0].read_bytes() == (tiny_dino / "model.safetensors").read_bytes()
    size = (tiny_dino / "model.safetensors").stat().st_size
    ranges = [line.rpartition(" ")[2] for line in server.seen if line.startswith("GET") and "bytes=" in line]
    starts = [int(each.removeprefix("bytes=").removesuffix("-")) for each in ranges]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] < size


def test_a_download_that_breaks_for_good_leaves_no_half_of_a_model(server, tiny_dino):
    server.faults["model.safetensors"] = ["cut"] + [500] * 40
    assert "the Hub has a fault of its own (500): try again later" in refused()
    server.faults.clear()
    assert resolve(REPO).weights[0].read_bytes() == (tiny_dino / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (401, "hf auth login"),
        (403, "the Hub does not accept the token (403)"),
        (404, "cannot be fetched"),
        (429, "too many requests from here: wait"),
        (500, "has a fault of its own (500): try again later"),
        (503, "has a fault of its own (503): try again later"),
    ],
)
def test_what_the_hub_says_becomes_a_sentence(server, status, sentence):
    server.faults[REPO] = [status] * 40
    message = refused()
    assert message.startswith(f"'{REPO}' cannot be fetched from the Hub: ")
    assert sentence in message
    server.faults.clear()
    assert resolve(REPO).revision


def test_a_busy_hub_is_asked_again(server):
    server.faults["config.json"] = [429, 503]
    assert resolve(REPO).revision


def test_gated_private_and_unknown_repositories(server, monkeypatch):
    server.gated.add(REPO)
    assert f"ask: do so at {server.endpoint}/{REPO}, then log in" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    assert "its owner lets in those who ask" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve(REPO).revision
    with pytest.raises(CheckpointError, match="there is none of that name, or it is private: check it at"):
        resolve("them/nothing")


def test_nobody_answers(settings):
    settings("ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub cannot be reached (offline?)" in refused()


def test_an_artifact_in_the_cache_loads_and_verifies(server, photos, tiny_dino, tmp_path):
    """There every file is a link to a blob."""
    result = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
    saved = result.save(tmp_path / "hybrid")
    names = [path for path in saved.rglob("*") if path.is_file()]
    server.repos["them/hybrid"] = {path.relative_to(saved).as_posix(): path.read_bytes() for path in names}
    pixels = torch.ones(1, 3, 56, 56)
    loaded = latte_convert.load("them/hybrid", verify=True)
    assert torch.equal(loaded(pixels).last_hidden_state, latte_convert.load(saved)(pixels).last_hidden_state)
    (snapshot,) = (tmp_path / "cache").glob("models--them--hybrid/snapshots/*")
    assert all(path.is_symlink() for path in snapshot.rglob("*") if not path.is_dir())
    assert latte_convert.verify(snapshot).probe_difference < 1e-6


def test_large_files_lie_elsewhere(server, settings, tiny_dino, monkeypatch):
    """The client is sent to another host, without its token, and takes a broken download up there."""
    settings("DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.gated.add(REPO)
    server.large.add("model.safetensors")
    server.faults["model.safetensors"] = ["cut"]
    found = resolve(REPO)
    assert found.weights[0].read_bytes() == (tiny_dino / "model.safetensors").read_bytes()
    there = [line for line in server.seen if line.startswith("GET /lfs/model.safetensors")]
    assert len(there) == 2
    assert "bytes=" in there[1]


def test_a_slow_hub(server, settings, tiny_dino):
    """It is waited for, asked again and, where it never answers, named; what is finished stays."""
    settings("HF_HUB_DOWNLOAD_TIMEOUT", PAUSE / 5)
    server.faults["model.safetensors"] = ["slow"]
    assert resolve(REPO).weights[0].read_bytes() == (tiny_dino / "model.safetensors").read_bytes()
    server.repos[REPO]["model.safetensors"] += b" "
    server.faults["model.safetensors"] = ["slow"] * 40
    sentence = refused()
    assert sentence.startswith(f"'{REPO}' cannot be fetched from the Hub: the connection broke again and again (")
    assert sentence.endswith("try again, finished files are kept.")


def test_models_of_timm_and_open_clip(server, tmp_path):
    """By repository, at a revision, and by a name of the library."""
    import open_clip_models
    import timm

    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    timm.models.save_for_hf(vit, tmp_path / "vit", safe_serialization=True)
    clip = open_clip_models.write(tmp_path / "clip")
    for repo, folder in (("them/vit", tmp_path / "vit"), ("them/clip", clip)):
        server.repos[repo] = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.repos["timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"] = server.repos["them/vit"]
    commit = server.commit("them/vit")
    for name, revision, kind in (
        ("timm:hf-hub:them/vit", None, "VisionTransformer"),
        (f"timm:hf-hub:them/vit@{commit}", None, "VisionTransformer"),
        ("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", None, "VisionTransformer"),
        ("them/vit", commit, "VisionTransformer"),
        ("open_clip:hf-hub:them/clip", None, "CLIP"),
        ("them/clip", None, "CLIP"),
    ):
        found = resolve(name, revision=revision)
        assert (found.id, found.model_class, len(found.revision)) == (name, kind, 40)
        assert found.instantiate(found.read_tensors())[1] == []
    with pytest.raises(CheckpointError, match="there is none of that name, or it is private"):
        resolve("timm:hf-hub:them/none")


@pytest.mark.slow
def test_the_command_line_streams_samples_of_the_hub(server, photos, tmp_path):
    """As a user has it: through HF_ENDPOINT, model and samples both from there."""
    datasets = pytest.importorskip("datasets")
    rows = {"image": [str(path) for path in sorted(photos.iterdir())]}
    samples = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    samples.to_parquet(tmp_path / "train.parquet")
    server.repos["datasets/them/photos"] = {"train.parquet": (tmp_path / "train.parquet").read_bytes()}
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {
        "HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip

    def convert(samples: str, out: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "latte_convert", "convert", REPO, "--calib", samples, "--samples", "6"]
        command += ["--kernel", "latte", "--out", str(tmp_path / out)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    done = convert("hf:them/photos:train:3:", "out")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out'}\n"), done.stderr
    assert [line for line in server.seen if line.startswith("GET /datasets/them/photos/resolve/")]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calibration"]["source"] == "hf:them/photos:train:3:"
    assert report["calibration"]["used"] + report["calibration"]["held_out"] == 6
    done = convert("hf:them/nothing", "none")
    assert (done.returncode, done.stdout) == (3, "")
    assert "them/nothing" in done.stderr
