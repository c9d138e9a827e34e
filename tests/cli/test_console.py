"""Interrupts and internal errors on the terminal."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import pytest


def test_an_internal_error_is_one_line_unless_debug(latte, tiny_dino, photos, tmp_path, monkeypatch):
    def bug(*_args, **_kwargs):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("latte_convert.conversion.convert", bug)
    arguments = ("convert", tiny_dino, "--calib", photos, "--out", tmp_path / "o")
    code, _, stderr = latte(*arguments)
    assert code == 1
    assert stderr.splitlines()[-1].startswith("latte: internal error: ZeroDivisionError: boom")
    assert "Traceback" not in stderr
    code, _, stderr = latte(*arguments, "--debug")
    assert code == 1
    assert "Traceback" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a scheduler"])
def test_an_interrupt_ends_with_a_sentence_and_leaves_nothing(kill, tiny_dino, photos, tmp_path):
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "latte_convert",
            "convert",
            str(tiny_dino),
            "--calib",
            str(photos),
            "--samples",
            "8",
            "--kernel",
            "latte",
            "--propagate-error",
            "--out",
            str(tmp_path / "o"),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("Calibrating"):
            break
    running.send_signal(kill)
    stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 128 + kill
    assert stdout == ""
    assert stderr.splitlines()[-1] == "latte: interrupted."
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_ends_as_another_error_is_an_interrupt(latte, monkeypatch, tmp_path):
    from latte_convert.cli import interrupts

    def swallowed(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            interrupts.stop()
        raise ModuleNotFoundError("could not be imported")  # as Transformers has it

    monkeypatch.setattr(interrupts, "_received", [])
    monkeypatch.setattr("latte_convert.artifact.manifest.read_manifest", swallowed)
    assert latte("inspect", tmp_path) == (130, "", "latte: interrupted.\n")


def test_a_swallowed_interrupt_stops_the_next_step(capsys, monkeypatch):
    from latte_convert.cli import console, interrupts

    monkeypatch.setattr(interrupts, "_received", [])
    with console.progress() as progress:
        advance = progress("Calibrating", 3)
        advance()
        with contextlib.suppress(KeyboardInterrupt):  # as a finaliser would
            interrupts.stop()
        with pytest.raises(KeyboardInterrupt):
            advance()
