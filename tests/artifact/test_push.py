"""Artifacts go to the Hub and come back from it; a stand-in on this machine takes its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub import TOKEN, Hub, hub

import latte_convert
from latte_convert.artifact.push import push
from latte_convert.errors import CheckpointError, IntegrityError, OutputError
from latte_convert.recipe import Recipe

ROUND_TRIP = """
import sys, torch, transformers, latte_convert
from huggingface_hub import HfApi, ModelCard
from latte_convert import Recipe

whole, source, photos, out = sys.argv[1:]
print(latte_convert.push(whole, "me/hybrid"))
HfApi().upload_file(path_or_fileobj=b"{}", path_in_repo="stale.json", repo_id="me/hybrid")
print(latte_convert.push(whole, "me/hybrid", message="again"))

pixels = torch.ones(1, 3, 56, 56)
expected = latte_convert.load(whole)(pixels).last_hidden_state
for model in (latte_convert.load("me/hybrid", verify=True), transformers.AutoModel.from_pretrained("me/hybrid")):
    assert latte_convert.is_hybrid(model)
    assert torch.equal(model(pixels).last_hidden_state, expected)
ModelCard.load("me/hybrid").validate()

api = HfApi()
api.create_repo("me/base")
api.upload_folder(repo_id="me/base", folder_path=source)
commit = api.model_info("me/base").sha
result = latte_convert.convert("me/base", photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
adapter = result.save(out, adapter=True)
latte_convert.push(adapter, "me/adapter")
api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id="me/base")
assert torch.equal(latte_convert.load("me/adapter")(pixels).last_hidden_state, result.model(pixels).last_hidden_state)
assert ModelCard.load("me/adapter").data.base_model == "me/base"
assert ModelCard.load("me/adapter").data.base_model_relation == "adapter"
print(commit)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub() as running:
        yield running


@pytest.mark.slow
def test_there_and_back(server: Hub, saved: Path, tiny_dino: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = shutil.copytree(saved, tmp_path / "whole" / "hybrid")
    (whole / ".DS_Store").touch()
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "HF_ENDPOINT": server.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    places = (str(whole), str(tiny_dino), str(photos), str(tmp_path / "adapter"))
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP, *places],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, commit = done.stdout.splitlines()
    assert first == second.replace(second[-40:], first[-40:])
    assert first.startswith(f"{server.endpoint}/me/hybrid/commit/")
    names = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert set(server.repos["me/hybrid"]) == {*names, ".gitattributes"}
    assert all(server.repos["me/hybrid"][name] == (saved / name).read_bytes() for name in names)
    base = json.loads(server.repos["me/adapter"]["latte.json"])["base"]
    assert (base["id"], base["revision"]) == ("me/base", commit)


Set = Callable[[str, str], None]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, server: Hub) -> Set:
    """Sets what the Hub's client has read from the environment when it was imported."""
    from huggingface_hub import constants

    def change(name: str, value: object) -> None:
        monkeypatch.setattr(constants, name, value)

    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    change("HF_HUB_OFFLINE", False)
    change("ENDPOINT", server.endpoint)
    return change


def test_what_keeps_it_from_the_hub(
    artifact: Path, settings: Set, monkeypatch: pytest.MonkeyPatch, server: Hub, latte: Callable[..., tuple]
) -> None:
    def message(repo: str = "me/new") -> str:
        with pytest.raises(OutputError, match=r"uploading takes a token|nothing was uploaded") as raised:
            push(artifact, repo)
        return str(raised.value)

    monkeypatch.setenv("HF_TOKEN", "hf_may_read")
    assert "the token may not write to me/new" in message()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "log in with 'hf auth login', or set HF_TOKEN" in message()
    code, stdout, stderr = latte("push", artifact, "me/new")
    assert (code, stdout) == (3, "")
    assert "hf auth login" in stderr
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    with pytest.raises(CheckpointError, match="'a/b/c' is no repository of the Hub"):
        push(artifact, "a/b/c")
    settings("ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub cannot be reached" in message()
    settings("HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in message() or "cannot be reached" in message()
    (artifact / "config.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"'config\.json' is not the file that was saved"):
        push(artifact, "me/new")
    assert "me/new" not in server.repos


def test_an_adapter_of_a_folder_is_pushed_with_a_word(
    tiny_dino: Path, photos: Path, tmp_path: Path, settings: Set, server: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    result = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
    push(result.save(tmp_path / "adapter", adapter=True), "me/of-a-folder")
    assert f"the base of this adapter is a folder on this disk ({tiny_dino})" in caplog.text
    assert "adapter.safetensors" in server.repos["me/of-a-folder"]


def test_no_such_artifact_on_the_hub() -> None:
    with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
        latte_convert.load("me/nothing")
