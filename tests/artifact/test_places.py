"""Where nothing can be written, or names that libraries do not take: refused before any work is done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from latte_convert.artifact.check import artifact_directory
from latte_convert.artifact.files import check_place, check_target
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.samples import open_samples
from latte_convert.errors import CheckpointError, DataError, OutputError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.report.write import check_report_target

pytestmark = pytest.mark.slow

ODD = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (ODD, "not UTF-8"),
        (f"{ODD}/a/b", "not UTF-8"),
        ("x" * 300, "File name too long"),
        (f"new/{'x' * 300}/b", "File name too long"),
        ("d/" * 2100 + "d", "File name too long"),
        ("file/a/b", "file is not a folder"),
        ("loop/a", "Too many levels of symbolic links"),
        ("a\0b", "null"),
    ],
)
def test_no_place_for_a_result(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    there = sorted(tmp_path.iterdir())
    for check in (
        lambda: check_target(tmp_path / name, overwrite=True),
        lambda: check_report_target(tmp_path / f"{name}.json", overwrite=True),
    ):
        with pytest.raises(OutputError, match=reason) as raised:
            check()
        assert len(str(raised.value)) < 700
    assert sorted(tmp_path.iterdir()) == there


def test_the_root_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="/ holds"):
        check_target(Path("/"), overwrite=True)
    with pytest.raises(OutputError, match="/ is a directory"):
        check_report_target(Path("/"), overwrite=True)


def test_a_link_to_itself_is_no_place(artifact: Path, tmp_path: Path, latte) -> None:
    for name in ("loop", "loop.json", "loop.html"):
        (tmp_path / name).symlink_to(name)
    loop = tmp_path / "loop"
    for command in (
        ("restore", artifact, "--out", loop),
        ("export", artifact, "--out", loop, "--overwrite"),
        ("convert", loop, "--calib", loop, "--out", tmp_path / "out"),
        ("report", loop, artifact, "-o", tmp_path / "new.html"),
        ("verify", loop),
    ):
        code, _, said = latte(*command)
        assert code == 3, said
        assert not (tmp_path / "out").exists()
    assert loop.is_symlink()


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        check_place(Path("/proc/new/hybrid"))  # its permissions say that it could be
    assert check_place(tmp_path / "a" / "b") == tmp_path


def test_no_output_lies_in_the_artifact_that_it_is_made_from(
    artifact: Path, result, photos: Path, latte, tmp_path: Path
) -> None:
    adapter = result.save(tmp_path / "adapter", adapter=True)
    for command in (
        ("restore", artifact, "--out", artifact / "restored"),
        ("merge", adapter, "--out", adapter / "whole"),
        ("export", artifact, "--out", artifact / "onnx" / "small"),
        ("convert", artifact, "--calib", photos, "--out", artifact / "again"),
    ):
        code, _, said = latte(*command)
        assert code == 3
        assert "lies in the artifact" in said
        assert not command[-1].exists()


def test_an_export_does_not_replace_the_artifact_that_it_is_made_from(artifact: Path, latte) -> None:
    code, _, said = latte("export", artifact, "--out", artifact, "--overwrite")
    assert code == 3
    assert "which would be lost" in said
    assert (artifact / "latte.json").is_file()


def test_an_artifact_of_a_name_that_is_not_utf_8(artifact: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(artifact, tmp_path / ODD)
    for read in (lambda: artifact_directory(odd), lambda: evaluate(odd, "fidelity", [tmp_path])):
        with pytest.raises(CheckpointError, match="is not UTF-8, and its files cannot be read: rename it"):
            read()


def test_samples_of_a_name_that_is_not_utf_8(artifact: Path, photos: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(photos, tmp_path / ODD)
    for read in (
        lambda: open_samples(odd, "image", samples=2),
        lambda: evaluate(artifact, "fidelity", [odd]),
        lambda: evaluate(artifact, "knn", [odd]),
    ):
        with pytest.raises(DataError, match="is not UTF-8"):
            read()


def test_a_sample_of_a_name_that_is_not_utf_8_is_used(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    first = min((tmp_path / "photos").iterdir())
    first.rename(first.with_name(ODD + first.suffix))
    assert rf"caf\udce9{first.suffix}" in open_samples(tmp_path / "photos", "image", samples=40).ids


def test_a_checkpoint_of_a_name_that_is_not_utf_8(tiny_dino: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(tiny_dino, tmp_path / ODD)
    for name in (str(odd), str(odd / "model.safetensors")):
        with pytest.raises(CheckpointError, match="is not UTF-8"):
            resolve(name)
