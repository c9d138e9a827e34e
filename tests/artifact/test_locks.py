"""What a killed run leaves is removed or finished by the next one; a live run keeps its own, wherever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from latte_convert import compat
from latte_convert.artifact.check import artifact_directory
from latte_convert.artifact.files import atomic_directory, check_target
from latte_convert.artifact.locks import claim, locked
from latte_convert.errors import CheckpointError, OutputError

WRITER = """
import sys, time
from pathlib import Path
from latte_convert import compat
from latte_convert.artifact import files
out = Path(sys.argv[1])
if sys.argv[2] == "between renames":
    compat.exchange = lambda *_: False
    rename = Path.rename
    def stop(self, target):
        rename(self, target)
        print("ready", flush=True)
        time.sleep(60)
    Path.rename = stop
with files.atomic_directory(out, overwrite=True) as directory:
    (directory / "latte.json").write_text("new")
    if sys.argv[2] == "writing":
        print("ready", flush=True)
        sys.stdin.read()
"""


@contextmanager
def writer(out: Path, stage: str = "writing", launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing ``out``; it goes on when its stdin is closed."""
    process = subprocess.Popen(
        [*launcher, sys.executable, "-c", WRITER, str(out), stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def write(out: Path, text: str = "mine") -> None:
    with atomic_directory(out, overwrite=True) as directory:
        (directory / "latte.json").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_run_left_is_removed(tmp_path):
    with writer(tmp_path / "out") as process:
        kill(process)
    assert len(names(tmp_path)) == 2, "a claim and its folder are left"
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def in_another_container() -> list[tuple[str, ...]]:
    """Ways to run a process whose number means nothing here."""
    apart = ("unshare", "--pid", "--fork", "--kill-child")
    try:
        works = subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    return [apart] if works else []


@pytest.mark.parametrize("launcher", [(), *in_another_container()], ids=str)
def test_a_run_that_is_alive_keeps_its_own(tmp_path, launcher):
    with writer(tmp_path / "out", launcher=launcher) as process:
        write(tmp_path / "out")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    assert (tmp_path / "out" / "latte.json").read_text() == "new", "the one that ended last"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("next_command", ["read", "write", "check"])
def test_a_kill_between_two_renames_loses_nothing(tmp_path, next_command):
    out = tmp_path / "out"
    write(out, "old")
    with writer(out, "between renames") as process:
        kill(process)
    assert not out.exists()
    if next_command == "read":
        assert artifact_directory(out) == out
    elif next_command == "write":
        write(out, "newer")
    else:
        with pytest.raises(OutputError, match="exists already"):
            check_target(out, overwrite=False)
    assert (out / "latte.json").read_text() == ("newer" if next_command == "write" else "new")
    assert names(tmp_path) == ["out"]


def test_a_failed_second_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, "old")
    monkeypatch.setattr(compat, "exchange", lambda *_: False)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OutputError, match="Input/output error"):
        write(out)
    assert (out / "latte.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_disk_without_locks_loses_nothing(tmp_path, monkeypatch):
    """There a dead run cannot be told from a living one: its files stay."""

    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with claim(tmp_path / "out") as claimed:
        write(tmp_path / "out")
        assert claimed.exists()
        with locked(tmp_path / "out" / "latte.json"):
            pass
    assert names(tmp_path) == ["out"]


def test_waiting_for_a_lock_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("latte_convert.artifact.locks._PATIENCE", 0.1)
    path = tmp_path / "latte.json"
    path.write_text("{}")
    with locked(path), pytest.raises(OutputError, match="another run of latte is writing to"), locked(path):
        pass


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127], ids=["letters", "two bytes each"])
def test_the_longest_name_that_the_disk_takes_is_taken(tmp_path, name):
    check_target(tmp_path / name, overwrite=False)
    write(tmp_path / name)
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"a" * 300, "File name too long"),
        (b"a" * 300 + b"/b", "File name too long"),
        (b"caf\xe9", r"'.*caf\\udce9' is not UTF-8"),
        (b"nul\0byte", "null"),
    ],
    ids=["long", "long parent", "Latin-1", "NUL"],
)
def test_a_name_that_cannot_be_written_is_refused_before_the_work(tmp_path, name, message):
    with pytest.raises(OutputError, match=message):
        check_target(tmp_path / os.fsdecode(name), overwrite=False)
    with pytest.raises(CheckpointError, match=r"there is no artifact at|cannot be an artifact|is not UTF-8"):
        artifact_directory(tmp_path / os.fsdecode(name))
