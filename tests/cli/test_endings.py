"""Every end of a command is a sentence and the exit code of the contract."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from latte_convert.errors import CheckpointError, IntegrityError

pytestmark = pytest.mark.slow


def raise_error(error: BaseException):
    raise error


def wrapped(make_shortage, replacement: Exception):
    """As a library or a room of ours reports it: the shortage is behind another error."""
    try:
        make_shortage()
    except (RuntimeError, MemoryError):
        raise replacement from None


def huge_tensor() -> None:
    torch.empty(10**15)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (huge_tensor, "out of memory: [enforce fail at alloc_cpu"),
        (lambda: np.empty(10**15), "out of memory: Unable to allocate"),
        (lambda: bytearray(10**15), "out of memory: this machine has no more"),
        (
            lambda: raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has")),
            "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB.",
        ),
        (lambda: raise_error(RuntimeError("std::bad_alloc")), "out of memory: std::bad_alloc"),
        (lambda: raise_error(OSError(errno.ENOMEM, "Cannot allocate memory")), "out of memory: [Errno 12]"),
        (lambda: wrapped(huge_tensor, IntegrityError("the probe does not run")), "latte: out of memory: [enforce"),
        (lambda: wrapped(huge_tensor, CheckpointError("x does not load.")), "latte: x does not load. out of memory"),
    ],
    ids=["CPU tensor", "array", "bytes", "CUDA tensor", "C++", "system", "behind integrity", "behind a checkpoint"],
)
@pytest.mark.parametrize(
    ("command", "lower"),
    [
        ("convert", "--samples or --resolution"),
        ("eval", "--batch-size or --samples"),
        ("verify", "Close other programs"),
    ],
)
def test_out_of_memory_says_what_to_lower(latte, monkeypatch, tmp_path, fault, message, command, lower):
    arguments = {
        "convert": ("convert", "model", "--calib", tmp_path, "--out", tmp_path / "o"),
        "eval": ("eval", tmp_path, "--task", "knn", "--data", tmp_path),
        "verify": ("verify", tmp_path),
    }
    for place in ("conversion.convert", "evaluation.evaluate.evaluate", "artifact.verify.verify"):
        monkeypatch.setattr(f"latte_convert.{place}", lambda *_, **__: fault())
    code, stdout, stderr = latte(*arguments[command])
    assert (code, stdout) == (3, ""), stderr
    assert message in stderr
    assert lower in stderr


def test_a_failing_disk_is_told_with_the_file(latte, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "latte_convert.artifact.verify.verify",
        lambda *_, **__: raise_error(OSError(errno.EIO, "Input/output error", "f")),
    )
    assert latte("verify", tmp_path) == (3, "", "latte: f: Input/output error.\n")


def run(*args: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "latte_convert", *map(str, args)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_results_to_a_full_disk():
    with open("/dev/full", "w") as full, run("schema", stdout=full) as process:
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (3, "latte: the results cannot be printed: No space left on device.\n")


def test_results_to_a_pipe_that_nobody_reads():
    reading, writing = os.pipe()
    os.close(reading)
    with run("schema", stdout=writing) as process:
        os.close(writing)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (3, "latte: the results cannot be printed: Broken pipe.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_notes_to_a_full_disk_stop_no_work(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "latte_convert", "verify", str(tmp_path)]
        assert subprocess.run(command, stderr=full, check=False, timeout=60).returncode == 5


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("schema", 0), ("--help", 0), ("verify .", 5)])
def test_streams_that_are_closed(arguments, code, closed, tmp_path):
    line = f'exec "$0" -m latte_convert {arguments} {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr
    assert "internal error" not in done.stderr


STARTED = """
import runpy, signal, sys

install = signal.signal

def tell(*arguments):
    install(*arguments)
    print(flush=True)

signal.signal = tell
sys.argv = ["latte", "verify", sys.argv[1]]
runpy.run_module("latte_convert", run_name="__main__")
"""
"""The command, which prints a line as soon as its handlers are in place."""


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a scheduler"])
def test_an_interrupt_during_the_first_imports_is_a_sentence(kill, tmp_path):
    for wait in (0, 0.05, 0.1, 0.2):
        with subprocess.Popen(
            [sys.executable, "-c", STARTED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait)
            process.send_signal(kill)
            _, stderr = process.communicate(timeout=60)
        if process.returncode != 5:  # it was quicker
            assert (process.returncode, stderr) == (128 + kill, "latte: interrupted.\n")
