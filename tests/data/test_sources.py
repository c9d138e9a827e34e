"""Folders, single files and archives, with the dirt they come with."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from data.making import (
    encoded,
    everything,
    fill,
    picture,
    put,
    reasons,
    shard,
    texts,
    tone,
    wav,
)

from latte_convert.data import samples as data_module
from latte_convert.data.samples import open_samples
from latte_convert.errors import DataError, UsageError


def test_hidden_files_and_archive_droppings_do_not_count(tmp_path: Path) -> None:
    root = tmp_path / ".hidden_root_is_fine"
    put(root / "a.png", encoded(picture(0)))
    for name in (".DS_Store", "._a.png", ".cache/b.png", "__MACOSX/._a.png", "__MACOSX/c.png", "sub/.d.png"):
        put(root / name, encoded(picture(1)))
    found = everything(root, "image", strict=True)
    assert found.ids == ("a.png",)
    assert found.skipped == ()


def test_equal_stems_in_two_folders_are_two_samples(tmp_path: Path) -> None:
    names = ("a/1.png", "b/1.png", "b/1.jpg")
    for number, name in enumerate(names):
        put(tmp_path / name, encoded(picture(number), "JPEG" if name.endswith("jpg") else "PNG"))
    assert sorted(everything(tmp_path, "image").ids) == sorted(names)


def test_link_loops_end_and_linked_folders_are_read(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    put(root / "sub" / "a.png", encoded(picture(0)))
    put(elsewhere / "b.png", encoded(picture(1)))
    (root / "sub" / "loop").symlink_to(root)
    (root / "self.png").symlink_to(root / "self.png")
    (root / "linked").symlink_to(elsewhere)
    found = everything(root, "image")
    assert sorted(found.ids) == ["linked/b.png", "sub/a.png"]
    assert list(reasons(found)) == ["self.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    os.mkfifo(tmp_path / "pipe.png")
    assert everything(tmp_path, "image").ids == ("000.png",)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are Unicode on this system")
def test_file_name_that_is_not_unicode(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")).write_bytes(encoded(picture(0)))
    found = everything(tmp_path, "image")
    assert found.ids == ("caf\\udce9.png",)
    assert json.loads(json.dumps(found.ids[0]).encode("utf-8")) == found[0].id


def test_folder_of_another_modality_says_what_is_there(tmp_path: Path) -> None:
    for number in range(13):
        put(tmp_path / f"{number}.WAV", wav(tone(100)))
    put(tmp_path / "LICENSE", b"free")
    put(tmp_path / "metadata.csv", b"file_name,text\n")
    with pytest.raises(DataError, match=r"13 \.wav files, .*this model takes images") as caught:
        open_samples(tmp_path, "image", samples=2)
    assert f"{tmp_path}/metadata.csv" in str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    put(tmp_path / ".DS_Store", b"x")
    with pytest.raises(DataError, match=r"is empty .*this model takes audio"):
        open_samples(tmp_path, "audio", samples=2)


def test_missing_path_names_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"no such file or folder: .*photoz .*nearest: photos"):
        open_samples(tmp_path / "photoz", "image", samples=1)
    with pytest.raises(DataError, match=r"'photoz' in .*nearest: photos"):
        open_samples(tmp_path / "photoz" / "train" / "deep", "image", samples=1)


@pytest.mark.parametrize("name", ["./x", "../x", "/x", "x/", "~/x-is-not-there", "x.txt", "x.JPG", "a/b", "x"])
def test_nothing_but_the_prefix_goes_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "HubRows", None)  # a call would be a TypeError
    with pytest.raises(DataError, match="no such file or folder") as caught:
        open_samples(name, "image", samples=1)
    assert ("write hf:" in str(caught.value)) == (name in ("a/b", "x"))


def test_one_file_and_unknown_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give the folder"):
        open_samples(put(tmp_path / "a.png", encoded(picture(0))), "image", samples=1)
    with pytest.raises(DataError, match=r"cannot read samples from a \.xlsx file.*\.jsonl"):
        open_samples(put(tmp_path / "a.xlsx", b"PK"), "text", samples=1)
    with pytest.raises(DataError, match="is a text file; this model takes images"):
        open_samples(put(tmp_path / "a.txt", b"hello"), "image", samples=1)
    with pytest.raises(UsageError, match="no data given"):
        open_samples("", "text", samples=1)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    fill(tmp_path / "photos", 1)
    assert everything("~/photos", "image").ids == ("000.png",)


def test_tar_members(tmp_path: Path) -> None:
    members = {f"./k{n}.JPG": encoded(picture(n), "JPEG") for n in range(3)}
    extra = {
        "k0.cls": b"1",
        "k0.txt": b"a caption",
        "._k0.jpg": b"x",
        "__MACOSX/a.jpg": b"x",
        "bad.jpg": b"x",
    }
    path = shard(tmp_path / "d.tar", members | extra)
    found = everything(path, "image")
    assert {s.id: s.sha256 for s in found} == {
        name.removeprefix("./"): hashlib.sha256(content).hexdigest() for name, content in members.items()
    }
    assert list(reasons(found)) == ["bad.jpg"]
    assert texts(everything(path, "text")) == {"k0.txt": "a caption"}
    with pytest.raises(DataError, match=r"\.jpg files.*this model takes audio"):
        open_samples(path, "audio", samples=1)


def test_damaged_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shard(tmp_path / "d.tar", {f"{n}.txt": bytes([65 + n]) * 2000 for n in range(3)})
    put(path, path.read_bytes()[: 512 * (5 + 5 + 1) + 700])  # ends inside the third member
    found = open_samples(path, "text", samples=2)
    assert sorted(found.ids) == ["0.txt", "1.txt"]
    assert "is damaged after" in caplog.text
    with pytest.raises(DataError, match=r"not a plain \.tar"):
        open_samples(shard(tmp_path / "z.tar", {"a.txt": b"a"}, "w:gz"), "text", samples=1)
