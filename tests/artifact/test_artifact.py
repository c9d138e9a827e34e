"""An artifact is strict on every key, and a failed write loses nothing."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import latte_convert
from latte_convert import compat
from latte_convert.artifact import files
from latte_convert.artifact.manifest import read_manifest
from latte_convert.artifact.tensors import digest, write_tensors
from latte_convert.errors import CheckpointError, IntegrityError, OutputError
from latte_convert.names import is_ours
from latte_convert.recipe import Recipe


def edit_weights(artifact: Path, change) -> None:
    tensors = load_file(artifact / "model.safetensors")
    change(tensors)
    save_file(tensors, artifact / "model.safetensors", metadata={"format": "pt"})


def edit_manifest(artifact: Path, change) -> None:
    manifest = json.loads((artifact / "latte.json").read_text())
    change(manifest)
    (artifact / "latte.json").write_text(json.dumps(manifest))


def test_a_sound_artifact_verifies(artifact):
    found = latte_convert.verify(artifact)
    assert found.files == 4
    assert found.probe_difference < 1e-5


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda m: m.update(min_tokens=99, probe=None, tool_version="9"), True),
        (lambda m: m.update(files=dict(reversed(m["files"].items()))), True),
        (lambda m: m["files"].update({"model.safetensors": "0"}), False),
        (lambda m: m["sites"].pop(), False),
        (lambda m: m["sites"][0]["options"].update(jpn=not m["sites"][0]["options"]["jpn"]), False),
        (lambda m: m["recipe"].update(resolution=56), False),
    ],
    ids=["what bench writes", "order", "weights", "sites", "options", "resolution"],
)
def test_the_fingerprint_is_that_of_the_hybrid(artifact, change, same):
    before = read_manifest(artifact).fingerprint
    edit_manifest(artifact, change)
    assert (read_manifest(artifact).fingerprint == before) is same


def test_the_report_says_of_which_artifact_it_is(result, tmp_path):
    saved = result.save(tmp_path / "hybrid")
    recorded = json.loads((saved / "report.json").read_text())["artifact_fingerprint"]
    assert recorded == result.report.artifact_fingerprint == read_manifest(saved).fingerprint


def test_saving_does_not_change_the_umask_rights(artifact):
    assert (artifact / "model.safetensors").stat().st_mode & 0o777 == (artifact / "latte.json").stat().st_mode & 0o777


def first_of_ours(tensors: dict) -> str:
    return next(key for key in tensors if key.endswith(".latte.sigma"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(first_of_ours(t)), r"latte\.sigma' is missing"),
        (lambda t: t.update({"encoder.layer.0.attention.latte.gamma": torch.zeros(1)}), "latte.gamma"),
        (lambda t: t.update({first_of_ours(t): torch.zeros(3)}), r"has shape \(3,\)"),
        (lambda t: t.update({"strange.weight": torch.zeros(1)}), r"does not know: strange\.weight"),
        (lambda t: t.pop("layernorm.weight"), r"1 tensors missing \(layernorm\.weight\)"),
        (lambda t: t.update({"layernorm.weight": torch.zeros(3)}), r"another shape \(layernorm\.weight\)"),
    ],
    ids=["lost scale", "unknown of ours", "wrong shape of ours", "unknown", "lost weight", "wrong shape"],
)
def test_load_is_strict_on_every_key(artifact, change, message):
    edit_weights(artifact, change)
    with pytest.raises(IntegrityError, match=message):
        latte_convert.load(artifact)


def test_a_changed_weight_is_found(artifact):
    edit_weights(artifact, lambda t: t["layernorm.weight"].add_(1e-3))
    latte_convert.load(artifact)  # loads: only verify and restore look at values
    with pytest.raises(IntegrityError, match=r"'model\.safetensors' is not the file that was saved"):
        latte_convert.verify(artifact)
    with pytest.raises(IntegrityError, match=r"'model\.safetensors' is not the file"):
        latte_convert.restore(artifact, artifact.parent / "original")
    assert not (artifact.parent / "original").exists()


def test_a_kernel_that_answers_otherwise_is_found(artifact):
    """All hashes right, as if another library version computed something else."""
    edit_manifest(artifact, lambda m: m["probe"].update(values=[v + 0.1 for v in m["probe"]["values"]]))
    with pytest.raises(IntegrityError, match="answers the probe differently"):
        latte_convert.verify(artifact)


EMPTY = {"kernel": "elu", "heads": 3, "head_dim": 16, "causal": False, "options": {}}
"""A site whose kernel has no tensors."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=99), "schema version 99.*Upgrade"),
        (lambda m: m.update(future=1), "future"),
        (lambda m: m.pop("source"), "source"),
        (lambda m: m["sites"].append({**m["sites"][0], "name": "encoder.layer.6.attention"}), "is missing"),
        (lambda m: m["sites"][0].update(options={"colour": 1}), "kernel 'latte' cannot be built"),
        (lambda m: m["sites"][0].update(kernel="monarch", options={"steps": 10**12}), "`steps` is 1000000000000"),
        (lambda m: m["sites"][0].update(kernel="performer", options={"features": 10**11}), "`features` is 1000"),
        (lambda m: m["sites"][0].update(kernel="elu", options={}, name="no.such"), "unknown tensors"),
        (lambda m: m["sites"].append({**EMPTY, "name": "no.such"}), r"no attention site 'no\.such'"),
        (lambda m: m["sites"].append({**EMPTY, "name": "embeddings"}), "no attention site 'embeddings'"),
        (lambda m: m["sites"][0].update(options={"input_map": True}, heads=4096, head_dim=65536), "is missing"),
        (lambda m: m["source"].update(model_class="BertModel"), "the manifest says BertModel"),
        (lambda m: m["sites"].append(m["sites"][0]), r"'encoder\.layer\.\d\.attention.*' is listed twice"),
        (lambda m: m["recipe"].update(resolution=[1]), r"resolution \[1\] is no number of pixels"),
    ],
    ids=[
        "future",
        "unknown key",
        "lost key",
        "extra site",
        "bad options",
        "endless",
        "no memory holds it",
        "renamed site",
        "unknown site",
        "a module that is no site",
        "too large",
        "other class",
        "site twice",
        "resolution",
    ],
)
def test_a_changed_manifest_is_found(artifact, change, message):
    edit_manifest(artifact, change)
    with pytest.raises(IntegrityError, match=message) as error:
        latte_convert.load(artifact)
    assert error.value.exit_code == 5


def test_not_json_not_there_not_an_artifact(artifact, tmp_path):
    (artifact / "latte.json").write_text("{")
    with pytest.raises(IntegrityError, match="damaged"):
        latte_convert.load(artifact)
    (artifact / "latte.json").write_text('{"schema_version": ' + "9" * 5000 + "}")
    with pytest.raises(IntegrityError, match="damaged"):
        latte_convert.load(artifact)
    (artifact / "latte.json").unlink()
    with pytest.raises(IntegrityError, match="not an artifact"):
        latte_convert.verify(artifact)
    with pytest.raises(CheckpointError, match="no artifact at"):
        latte_convert.load(tmp_path / "absent")


def test_a_lost_file_is_found(artifact):
    (artifact / "preprocessor_config.json").unlink()
    with pytest.raises(IntegrityError, match=r"'preprocessor_config\.json' is missing"):
        latte_convert.verify(artifact)


def test_an_existing_output_is_refused_and_untouched(result, tmp_path):
    out = tmp_path / "there"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="exists already"):
        result.save(out)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    with pytest.raises(OutputError, match="was not written by latte"):
        result.save(out, overwrite=True)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]


def test_an_artifact_and_an_empty_directory_can_be_replaced(result, artifact, tmp_path):
    (artifact / "report.html").write_text("old")
    result.save(artifact, overwrite=True)
    assert (artifact / "report.html").read_text() != "old"
    (tmp_path / "empty").mkdir()
    result.save(tmp_path / "empty", overwrite=True)
    assert latte_convert.verify(tmp_path / "empty").files == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "hybrid"]


def test_nothing_that_is_needed_is_ever_replaced(artifact, tiny_dino, photos, tmp_path, monkeypatch):
    photos = shutil.copytree(photos, tmp_path / "home" / "photos")
    count = len(list(photos.iterdir()))
    model = shutil.copytree(tiny_dino, tmp_path / "home" / "model")
    shutil.copy(artifact / "latte.json", tmp_path / "home")  # as if home were an artifact
    result = latte_convert.convert(model, photos, recipe=Recipe(kernel="latte", samples=4))
    for out in (model, photos, tmp_path / "home", tmp_path / "home" / "x" / ".." / "model"):
        with pytest.raises(OutputError, match="would be lost"):
            result.save(out, overwrite=True)
    with pytest.raises(OutputError, match="would be lost"):
        latte_convert.restore(artifact, artifact.parent / "y" / ".." / "hybrid", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="would be lost"):
        latte_convert.restore(artifact, tmp_path / "link" / "hybrid", overwrite=True)
    monkeypatch.chdir(tmp_path / "home")
    with pytest.raises(OutputError, match="would be lost"):
        latte_convert.restore(artifact, tmp_path / "home", overwrite=True)
    assert latte_convert.verify(artifact).files == 4
    assert len(list(photos.iterdir())) == count


def test_a_restored_original_can_be_replaced_by_itself(artifact, tmp_path):
    out = latte_convert.restore(artifact, tmp_path / "original")
    latte_convert.restore(artifact, out, overwrite=True)
    (out / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="was not written by latte"):
        latte_convert.restore(artifact, out, overwrite=True)


def test_a_directory_that_appears_meanwhile_is_left_alone(tmp_path):
    def write() -> None:
        with files.atomic_directory(tmp_path / "out", overwrite=False) as directory:
            (directory / "new").write_text("new")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(OutputError, match="has appeared meanwhile"):
        write()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["theirs"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_an_old_directory_is_exchanged(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(compat, "exchange", lambda *_: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with files.atomic_directory(tmp_path / "out", overwrite=True) as directory:
        (directory / "new").write_text("new")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_restore_checks_every_file(artifact, tmp_path):
    with (artifact / "preprocessor_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(IntegrityError, match=r"'preprocessor_config\.json' is not the file"):
        latte_convert.restore(artifact, tmp_path / "original")
    assert not (tmp_path / "original").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].clear(), "does not name"),
        (lambda m: m["files"].pop("config.json"), r"does not name: config\.json"),
        (lambda m: m["files"].update({"../../secret": "0" * 64}), "not a file inside the artifact"),
        (lambda m: m["files"].update({"/etc/hostname": "0" * 64}), "not a file inside the artifact"),
        (lambda m: m["probe"].update(method="zero_grad"), "method"),
        (lambda m: m["sites"][0].update(heads=-1), "heads"),
        (lambda m: m.update(min_tokens=-1), "min_tokens"),
        (lambda m: m["probe"]["inputs"]["pixel_values"].update(shape=[1, 3]), "does not run"),
    ],
    ids=["no files", "one file less", "parent", "absolute", "method", "heads", "min_tokens", "probe shape"],
)
def test_a_manifest_cannot_lie_or_point_elsewhere(artifact, change, message):
    edit_manifest(artifact, change)
    with pytest.raises(IntegrityError, match=message):
        latte_convert.verify(artifact)


def test_files_that_the_manifest_does_not_name_are_found(artifact, tmp_path):
    (artifact / "modeling_evil.py").write_text("")
    with pytest.raises(IntegrityError, match=r"does not name: modeling_evil\.py"):
        latte_convert.verify(artifact)
    with pytest.raises(IntegrityError, match="does not name"):
        latte_convert.restore(artifact, tmp_path / "original")


def test_a_source_with_tensors_of_our_name_is_refused(tiny_dino, photos, tmp_path):
    model = shutil.copytree(tiny_dino, tmp_path / "model")
    edit_weights(model, lambda t: t.update({"foo.latte.alpha": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"foo\.latte\.alpha"):
        latte_convert.convert(model, photos, recipe=Recipe(samples=4))


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_artifact(result, artifact, monkeypatch, failure):
    before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}

    def fail(*_args, **_kwargs):
        raise failure

    monkeypatch.setattr("latte_convert.report.write.write_html", fail)  # the last file that is written
    with pytest.raises((OutputError, KeyboardInterrupt)) as error:
        result.save(artifact, overwrite=True)
    if isinstance(failure, OSError):
        assert "disk is full" in str(error.value)
    assert {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()} == before
    assert [path.name for path in artifact.parent.iterdir()] == ["hybrid"]


def test_a_full_disk_is_seen_before_the_work(result, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(OutputError, match="MB free"):
        result.save(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_output_below_a_file_is_refused(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file is not a folder"):
        result.save(tmp_path / "file" / "out")
    with pytest.raises(OutputError, match="not a directory"):
        result.save(tmp_path / "file", overwrite=True)


def test_tied_and_strided_tensors_are_written_in_full(tmp_path):
    table = torch.randn(4, 6)
    tensors = {"a.weight": table, "b.weight": table, "c": table.T, "d": torch.zeros(0)}
    assert write_tensors(tensors, tmp_path) == ["model.safetensors"]
    back = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())


def test_files_are_those_of_safetensors_to_the_byte(tmp_path):
    kinds = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    tensors = {f"{name}.{kind}": torch.ones(3, 5).to(kind) for kind in kinds for name in ("b", "a", "ü")}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    write_tensors(tensors, tmp_path)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_large_checkpoints_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr("latte_convert.artifact.tensors.SHARD_SIZE", "1KB")
    tensors = {f"layer.{i}.weight": torch.randn(100) for i in range(5)}
    names = write_tensors(tensors, tmp_path)
    assert "model.safetensors.index.json" in names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert len(names) > 2
    for key, name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / name)[key], tensors[key])


def test_sharded_artifact_round_trip(result, tmp_path, monkeypatch):
    monkeypatch.setattr("latte_convert.artifact.tensors.SHARD_SIZE", "200KB")
    out = result.save(tmp_path / "hybrid")
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert latte_convert.verify(out).probe_difference < 1e-5


def test_digest_sees_key_dtype_shape_and_bytes():
    base = {"a": torch.tensor([1.0, 2.0])}
    others = [
        {"b": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.tensor([1.0, 2.5])},
        {"a": torch.tensor([1.0, -0.0])},
    ]
    assert digest(base) == digest({"a": torch.tensor([1.0, 9.0, 2.0, 9.0])[::2]})
    assert len({digest(t) for t in [base, *others]}) == 6
    assert digest({"a": torch.ones(2, dtype=torch.bfloat16)}) != digest({"a": torch.zeros(2, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("encoder.layer.0.attention.latte.alpha", True),
        ("attn.latte.sigma", True),
        ("latte.weight", False),
        ("encoder.latte.layer.weight", False),
        ("encoder.latte_layer.weight", False),
    ],
)
def test_which_keys_are_ours(key, expected):
    assert is_ours(key) is expected


def test_reports_are_strict_json_and_follow_the_published_schema(artifact):
    import jsonschema

    from latte_convert.artifact.manifest import Manifest
    from latte_convert.report.schema import Report

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    for name, model in (("report.json", Report), ("latte.json", Manifest)):
        content = json.loads((artifact / name).read_text(), parse_constant=refuse)
        schema = model.model_json_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
