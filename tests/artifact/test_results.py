"""Every file beside the checkpoint is recorded when it is written, and a changed one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import latte_convert
from latte_convert.artifact import results
from latte_convert.artifact.manifest import read_manifest
from latte_convert.artifact.results import write_files
from latte_convert.errors import IntegrityError, OutputError

pytestmark = pytest.mark.slow


def add_results(artifact: Path) -> None:
    """What ``latte bench --save``, ``latte eval --out`` and ``latte report --plots`` write."""
    names = ("bench.json", "eval-knn.json", "plots/report-sensitivity.png")
    write_files({artifact / name: lambda path, name=name: path.write_bytes(name.encode()) for name in names})


EVERY = ["report.json", "report.html", "README.md", "bench.json", "eval-knn.json", "plots/report-sensitivity.png"]


@pytest.fixture
def measured(artifact: Path) -> Path:
    add_results(artifact)
    return artifact


def test_what_is_written_into_an_artifact_is_recorded(measured):
    assert sorted(read_manifest(measured).results) == sorted(EVERY)
    found = latte_convert.verify(measured)
    assert (found.files, found.results) == (4, 6)
    before = read_manifest(measured)
    write_files({measured / "bench.json": lambda path: path.write_text("again")})
    assert read_manifest(measured).fingerprint == before.fingerprint, "results are no part of the hybrid"
    assert latte_convert.verify(measured).results == 6


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("fault", ["edited", "cut short", "emptied", "swapped", "lost"])
def test_a_changed_result_is_found(measured, name, fault):
    path = measured / name
    content = path.read_bytes()
    if fault == "edited":
        path.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    elif fault == "cut short":
        path.write_bytes(content[:-1])
    elif fault == "emptied":
        path.write_bytes(b"")
    elif fault == "swapped":
        path.write_bytes(b"that of another artifact")
    else:
        path.unlink()
    with pytest.raises(IntegrityError, match=f"'{name}' is (not the file that was saved|missing)") as error:
        latte_convert.verify(measured)
    assert error.value.exit_code == 5
    with pytest.raises(IntegrityError):
        latte_convert.load(measured, verify=True)
    latte_convert.load(measured)


@pytest.mark.parametrize("name", ["eval-sts.json", "notes.bin", "sub/deep/model.safetensors", "pytorch_model.bin"])
def test_a_file_that_nobody_recorded_is_found(measured, name):
    (measured / name).parent.mkdir(parents=True, exist_ok=True)
    (measured / name).write_text("{}")
    with pytest.raises(IntegrityError, match=f"does not name: {name}"):
        latte_convert.verify(measured)


@pytest.mark.parametrize("name", [".DS_Store", ".git/config", ".cache/huggingface/model.lock"])
def test_hidden_files_are_no_part_of_it(measured, name):
    (measured / name).parent.mkdir(parents=True, exist_ok=True)
    (measured / name).write_text("")
    assert latte_convert.verify(measured).results == 6


def test_loading_can_verify(artifact, saved):
    model = latte_convert.load(artifact, verify=True)
    assert type(model).__name__ == "Dinov2Model"
    manifest = json.loads((artifact / "latte.json").read_text())
    manifest["probe"]["values"][0] += 1
    (artifact / "latte.json").write_text(json.dumps(manifest))
    latte_convert.load(artifact)
    with pytest.raises(IntegrityError, match="answers the probe differently"):
        latte_convert.load(artifact, verify=True)
    manifest["source"]["tensors_sha256"] = "0" * 64
    (artifact / "latte.json").write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match="original's tensors are not those recorded"):
        latte_convert.load(artifact, verify=True)


def test_an_edited_cosine_passes_no_comparison(latte, measured, saved):
    """A better fidelity written into the old report would hide that the new one is worse, and the other way round."""
    for name in EVERY[2:]:
        (measured / name).unlink()
    manifest = json.loads((measured / "latte.json").read_text())
    manifest["results"] = {name: manifest["results"][name] for name in ("report.json", "report.html")}
    (measured / "latte.json").write_text(json.dumps(manifest))
    assert latte("report", saved, measured, "--compare")[0] == 0
    report = json.loads((measured / "report.json").read_text())
    primary = report["fidelity"]["primary"]
    report["fidelity"]["outputs"][primary]["cosine"] = 1.0
    (measured / "report.json").write_text(json.dumps(report))
    for command in (["report", saved, measured, "--compare"], ["report", measured], ["inspect", measured]):
        code, stdout, stderr = latte(*command)
        assert (code, stdout) == (5, ""), stderr
        assert "report.json is not the file that latte wrote there" in stderr


def test_a_failed_write_changes_nothing(measured):
    before = {path: path.read_bytes() for path in measured.rglob("*") if path.is_file()}

    def fail(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"eval-knn\.json was not written: the disk is full"):
        write_files({measured / "bench.json": lambda path: path.write_text("new"), measured / "eval-knn.json": fail})
    assert {path: path.read_bytes() for path in measured.rglob("*") if path.is_file()} == before


KILLED = """
import os, signal, sys
from pathlib import Path
from latte_convert.artifact import results
folder, stage = Path(sys.argv[1]), int(sys.argv[2])
count = 0
replace = Path.replace
def die_at(self, target):
    global count
    count += 1
    if count == stage:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = die_at
names = ("bench.json", "eval-knn.json", "eval-new.json")
results.write_files({folder / name: lambda path: path.write_text("new") for name in names})
"""


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_kill_at_any_rename_leaves_all_of_the_old_or_all_of_the_new(measured, stage):
    """Rename 1 is that of the manifest; the files follow."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(measured), str(stage)], check=False)
    assert killed.returncode == -9
    assert latte_convert.verify(measured).results == (6 if stage == 1 else 7)
    contents = {name: (measured / name).read_text() for name in ("bench.json", "eval-knn.json")}
    assert contents == {name: name if stage == 1 else "new" for name in contents}
    assert not [path for path in measured.iterdir() if path.name.startswith(".")], "nothing hidden is left"


def test_a_killed_run_does_not_spoil_the_next_one(measured):
    """The next run replaces a file whose new name the killed one had still to give it."""
    subprocess.run([sys.executable, "-c", KILLED, str(measured), "2"], check=False)
    write_files({measured / "bench.json": lambda path: path.write_text("newest")})
    assert (measured / "bench.json").read_text() == "newest"
    assert (measured / "eval-new.json").read_text() == "new"
    assert latte_convert.verify(measured).results == 7


def test_two_runs_at_once_are_both_recorded(measured):
    code = (
        "import sys; from pathlib import Path; from latte_convert.artifact.results import write_files\n"
        "for i in range(20): write_files({Path(sys.argv[1]) / f'eval-{sys.argv[2]}-{i}.json': "
        "lambda path: path.write_text(sys.argv[2])})"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(measured), name]) for name in ("a", "b", "c")]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert latte_convert.verify(measured).results == 66


def test_a_read_only_artifact_verifies(measured):
    for path in (*measured.rglob("*"), measured):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert latte_convert.verify(measured).results == 6
    finally:
        for path in (measured, *measured.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)


def test_a_file_outside_an_artifact_is_just_written(tmp_path, measured):
    write_files({tmp_path / "page.html": lambda path: path.write_text("page")})
    assert (tmp_path / "page.html").read_text() == "page"
    assert results.home_of(tmp_path / "page.html") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hybrid", "page.html"]


def test_the_original_inside_that_cannot_be_used_is_an_integrity_error(latte, artifact):
    """Even where its hash is right: the artifact is what is damaged, not what the user gave."""
    manifest = json.loads((artifact / "latte.json").read_text())
    for change in ({"model_type": "dinov9"}, {"patch_size": "wide"}, {"num_attention_heads": 5}):
        config = json.loads((artifact / "config.json").read_text())
        (artifact / "config.json").write_text(json.dumps({**config, **change}))
        manifest["files"]["config.json"] = results.sha256_file(artifact / "config.json")
        (artifact / "latte.json").write_text(json.dumps(manifest))
        code, _, stderr = latte("verify", artifact)
        assert code == 5, stderr


@pytest.mark.parametrize("name", ["eval-knn.json", "preprocessor_config.json", "model.safetensors"])
def test_a_hole_of_many_gigabytes_is_not_read(measured, name, monkeypatch):
    """The manifest may vouch for it: to hash it would take minutes."""
    with (measured / name).open("r+b") as file:
        file.truncate(100 * 10**9)
    hashed = []
    monkeypatch.setattr("latte_convert.artifact.check.sha256_file", lambda path: hashed.append(path) or "")
    monkeypatch.setattr("latte_convert.artifact.check.settle", lambda _: None)
    manifest = json.loads((measured / "latte.json").read_text())
    for part in ("files", "results"):
        manifest[part] = dict.fromkeys(manifest[part], "")
    (measured / "latte.json").write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match=f"'{name}' is not the file that was saved"):
        latte_convert.verify(measured)
    assert measured / name not in hashed
