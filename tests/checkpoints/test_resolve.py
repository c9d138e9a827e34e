"""One triage for every name of a checkpoint: what is found, at which revision, and how far it is trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from open_clip_models import write as write_open_clip
from safetensors.torch import load_file, save_file
from timm_models import write as write_timm

from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import CheckpointError

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(scope="module")
def sources(tiny_dino: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {
        "transformers": tiny_dino,
        "timm": write_timm(root / "timm"),
        "open_clip": write_open_clip(root / "open_clip"),
    }


@pytest.fixture(params=["transformers", "timm", "open_clip"])
def cached(request, sources, tmp_path, monkeypatch) -> str:
    """A repository ``org/m`` in the local Hub cache with two revisions, whose weights differ; gives its library."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--m"
    (repo / "refs").mkdir(parents=True)
    for number, (name, commit) in enumerate(COMMITS.items()):
        snapshot = repo / "snapshots" / commit
        (repo / "refs" / name).write_text(commit)
        shutil.copytree(sources[request.param], snapshot)
        for file in snapshot.glob("*.safetensors"):
            blob = repo / "blobs" / f"{commit}-{file.name}"
            blob.parent.mkdir(exist_ok=True)
            save_file({k: t + number for k, t in load_file(file).items()}, blob, metadata={"format": "pt"})
            file.unlink()
            file.symlink_to(blob)
        config = next(iter(snapshot.glob("*config.json")))
        config.rename(repo / "blobs" / f"{commit}-config")
        config.symlink_to(repo / "blobs" / f"{commit}-config")
    return request.param


def names(library: str) -> list[str]:
    return ["org/m", *([] if library == "transformers" else [f"{library}:hf-hub:org/m"])]


def test_a_revision_is_what_is_read_and_recorded(cached, sources):
    key, tensor = next(iter(resolve(sources[cached]).read_tensors().items()))
    for name in names(cached):
        for revision, commit, shift in ((None, COMMITS["main"], 0), ("v1", COMMITS["v1"], 1), ("main", "a" * 40, 0)):
            found = resolve(name, revision=revision)
            assert (found.library, found.id, found.revision) == (cached, name, commit)
            torch.testing.assert_close(found.read_tensors()[key], tensor + shift)
            assert {file.name for file in found.path.glob("*config.json")} <= {*found.sidecars()}
        with pytest.raises(CheckpointError, match=r"'org/m' at revision 'v9' is not .* in the local Hub cache"):
            resolve(name, revision="v9")
    if cached != "transformers":
        assert resolve(f"{cached}:hf-hub:org/m@v1").revision == COMMITS["v1"]
        with pytest.raises(CheckpointError, match="name two revisions"):
            resolve(f"{cached}:hf-hub:org/m@v1", revision="main")


def test_a_revision_of_what_is_on_this_disk(sources):
    for library, path in sources.items():
        for name in (str(path), *([] if library == "transformers" else [f"{library}:local-dir:{path}"])):
            assert resolve(name).revision is None
            with pytest.raises(CheckpointError, match="--revision is for models of the Hub"):
                resolve(name, revision="main")


def test_a_revision_of_a_pretrained_tag():
    with pytest.raises(CheckpointError, match=r"give open_clip:hf-hub:\S+@v1"):
        resolve("open_clip:ViT-B-32/laion2b_s34b_b79k", revision="v1")


@pytest.mark.parametrize("library", ["transformers", "timm", "open_clip"])
def test_the_file_that_was_named_is_the_one_that_is_read(library, sources, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(sources[library], folder)
    file = next(iter(folder.glob("*.safetensors")))
    other = folder / "other.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, other)
    assert resolve(other).weights == (other,)
    assert resolve(folder).weights == (file,)


@pytest.mark.parametrize("library", ["transformers", "timm", "open_clip"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_what_a_wrapper_of_training_puts_before_every_key(library, prefix, sources, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(sources[library], folder)
    file = next(iter(folder.glob("*.safetensors")))
    tensors = load_file(file)
    save_file({prefix + key: tensor for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    found = resolve(folder)
    model, unexpected = found.instantiate(found.original_tensors())
    assert unexpected == []
    assert found.original_tensors().keys() == tensors.keys()
    plain, _ = resolve(sources[library]).instantiate(tensors)
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in plain.state_dict().items())
    # Where just some keys have it, it is a name like any other.
    first, *others = tensors
    save_file({prefix + first: tensors[first]} | {key: tensors[key] for key in others}, file)
    with pytest.raises(CheckpointError, match="1 tensors missing"):
        found.instantiate(found.original_tensors())


def test_a_pickle_that_an_index_names(sources, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(sources["transformers"], folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "shard.bin")
    index = {"weight_map": dict.fromkeys(tensors, "shard.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"shard\.bin is no safetensors file .*--allow-pickle"):
        resolve(folder)
    assert resolve(folder, allow_pickle=True).read_tensors().keys() == tensors.keys()


def test_a_side_file_that_leads_out_of_the_checkpoint(sources, tmp_path, caplog):
    folder, secret = tmp_path / "source", tmp_path / "id_rsa"
    shutil.copytree(sources["transformers"], folder)
    secret.write_text("secret")
    (folder / "notes.txt").symlink_to(secret)
    (folder / "LICENSE").write_text("free")
    (folder / "LICENSE.txt").symlink_to(folder / "LICENSE")
    assert {"LICENSE", "LICENSE.txt", "config.json"} <= {*resolve(folder).sidecars()}
    assert "notes.txt" not in resolve(folder).sidecars()
    assert f"notes.txt links to {secret}, outside the checkpoint, and is not copied" in caplog.text
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config.json links to .*: copy the folder with 'cp -rL'"):
        resolve(folder)


HUGE = {
    "transformers": [("num_hidden_layers", 100_000), ("hidden_size", 3 * 2**20), ("hidden_size", 10**30)],
    "timm": [("model_args", {"depth": 100_000}), ("model_args", {"embed_dim": 3 * 2**20})],
    "open_clip": [("vision_cfg", {"layers": 100_000}), ("text_cfg", {"width": 2**22}), ("embed_dim", 10**10)],
}


@pytest.mark.parametrize(("library", "change"), [(name, change) for name, found in HUGE.items() for change in found])
def test_a_configuration_of_another_size_takes_neither_hours_nor_memory(library, change, sources, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(sources[library], folder)
    file = next(iter(folder.glob("*config.json")))
    config = json.loads(file.read_text())
    name, value = change
    part = config["model_cfg"] if library == "open_clip" else config
    part[name] = {**part.get(name, {}), **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(config))
    found = resolve(folder)
    with pytest.raises(
        CheckpointError, match=r"asks for 100,000 layers|describes a model of|does not load|cannot build"
    ):
        found.instantiate(found.original_tensors())


@pytest.mark.parametrize("name", ["num_labels", "num_classes"])
def test_a_configuration_of_a_billion_classes(name, sources, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(sources["transformers"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: 10**9}))
    with pytest.raises(CheckpointError, match=f"'{name}' is 1,000,000,000, and at most 1,000,000 classes"):
        resolve(folder)
