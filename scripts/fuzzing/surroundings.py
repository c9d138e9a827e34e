"""Attacks from around a command: where it is to write, what happens to its files meanwhile, how it was started."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.cases import Case, run
from fuzzing.material import CALIBRATION, FEW, MODELS

PRECIOUS = "precious"
"""What a file holds that no command may touch."""


def bind(path: Path) -> None:
    """Make a socket; its whole path may be longer than an address can be."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text(PRECIOUS)


THERE: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text(PRECIOUS),
    "a folder with a file": _folder,
    "a pipe": os.mkfifo,
    "a socket": bind,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a folder": lambda path: (_folder(path.with_name("linked")), path.symlink_to("linked")),
    "a link to /dev/full": lambda path: path.symlink_to("/dev/full"),
    "a read-only folder": lambda path: (path.mkdir(), path.chmod(0o500)),
    "an empty folder": Path.mkdir,
}
"""What is already where something is to be written."""
PLACES = (
    ".", "..", "", "/", "/proc", "/proc/self/out", "/proc/self/fd/out", "/dev/null", "/dev/full/out", "{source}",
    "{source}/out", "{source}/..", "{source}/config.json/out", "model", "samples", "samples/out", "x/" * 300,
    "a/../b/../..", "~nobody/out",
)  # fmt: skip
"""Where something is to be written."""


def _writers(random: Random, material: Path, work: Path, out: str) -> tuple[Any, ...]:
    """A command that writes, on copies of the material."""
    for name, source in (("model", "models/vit"), ("hybrid", "artifacts/vit"), ("adapter", "artifacts/adapter"),
                         ("samples", "photos")):  # fmt: skip
        shutil.copytree(material / source, work / name)
    convert = ("convert", "model", "--calib", "samples", *FEW, "--kernel", "latte")
    command = random.choice((
        ("restore", "hybrid", "--out", out), ("restore", "hybrid", "--out", out),
        ("merge", "adapter", "--out", out), ("merge", "adapter", "--out", out), ("export", "hybrid", "--out", out),
        (*convert, "--out", out), (*convert, "--adapter", "--out", out),
        ("report", "hybrid", "--out", f"{out}.html"), ("report", "hybrid", "other", "--out", f"{out}.html"),
        ("score", *convert[1:], "--out", f"{out}.html"),
        ("eval", "hybrid", "--task", "fidelity", "--data", "samples", "--samples", 2, "--out", f"{out}.json"),
    ))  # fmt: skip
    return (*command[:-1], command[-1].format(source=command[1]))


def place(random: Random, material: Path, work: Path) -> Case:
    """An output that is there already as something else, or cannot be, or would replace what is needed."""
    over = random.choice(((), ("--overwrite",), ("--overwrite",)))
    if random.random() < 0.5:
        out, what = "out", random.choice(list(THERE))
    else:
        out = what = random.choice(PLACES)
    command = _writers(random, material, work, out)
    shutil.copytree(material / "artifacts" / "other", work / "other")
    if what in THERE:
        THERE[what](work / str(command[-1]))
    runs = [
        run(*command, *over, codes=(0, 2, 3)),
        run("verify", "hybrid", codes=(0,)),
        run("verify", "adapter", codes=(0,)),
    ]
    return Case(
        "place", f"{' '.join(map(str, command[:2]))} to {what!r:.60}{' anew' if over else ''}", runs, keep=_files(work)
    )


def _files(work: Path) -> dict[Path, bytes]:
    """What must be as it is afterwards: everything but artifacts, which a command may replace."""
    kept = ("model", "samples", "linked", "out")
    return {
        path: path.read_bytes()
        for name in kept
        for path in (work / name, *(work / name).rglob("*"))
        if path.is_file() and path.resolve().is_relative_to(work)
    }


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "replaced by a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "replaced by a folder": lambda path: (path.unlink(), path.mkdir()),
    "unreadable": lambda path: path.chmod(0),
}
"""What happens to a file while a command works."""


def meddle(random: Random, material: Path, work: Path) -> Case:
    """A file that is changed, cut short or removed while a command reads it."""
    name = random.choice(MODELS)
    if random.random() < 0.6:
        folder = shutil.copytree(material / "models" / name, work / "model")
        samples = material / CALIBRATION[name]
        calib = work / "samples"
        (shutil.copytree if samples.is_dir() else shutil.copyfile)(
            samples, calib if samples.is_dir() else work / samples.name
        )
        calib = calib if samples.is_dir() else work / samples.name
        command: tuple[Any, ...] = ("convert", folder, "--calib", calib, *FEW, "--kernel", "latte", "--out", "out")
        seconds = 2.5
        targets = [*folder.iterdir(), *(calib.iterdir() if calib.is_dir() else [calib])]
    else:
        folder = shutil.copytree(material / "artifacts" / name, work / "hybrid")
        command = random.choice((
            ("restore", folder, "--out", "out"), ("verify", folder), ("report", folder), ("inspect", folder),
            ("eval", folder, "--task", "fidelity", "--data", material / CALIBRATION[name], "--samples", 2),
        ))  # fmt: skip
        seconds = 0.8
        targets = list(folder.iterdir())
    files = sorted(path for path in targets if path.is_file())
    heavy = [path for path in files if path.suffix == ".safetensors"]
    file = random.choice(files + heavy * len(files))
    what = random.choice(list(CHANGES))
    after = random.uniform(0, seconds)
    runs = [run(*command, absent=work / "out", meanwhile=(lambda: CHANGES[what](file), after))]
    if command[-1] == "out":
        runs.append(
            run(
                "verify" if command[0] == "convert" else "inspect",
                "out",
                codes=(0, 3, 5) if command[0] == "restore" else (0, 3),
            )
        )
    return Case("meddle", f"{file.name} {what} after {after:.2f} s of {command[0]}", runs)


VARIABLES: dict[str, tuple[str | None, ...]] = {
    "HOME": (None, "", "/nonexistent", "/dev/null"), "TMPDIR": ("/nonexistent", "", "/dev/null"),
    "PYTHONIOENCODING": ("ascii", "utf-16", "ascii:strict"), "LANG": ("C", "tr_TR.UTF-8"), "LC_ALL": ("C", "xx"),
    "COLUMNS": ("1", "0", "-5", "x", "99999"), "LINES": ("0",), "TERM": (None, "dumb", "xterm"), "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",), "PATH": (None, ""), "TZ": ("Nowhere/Land",), "XDG_CACHE_HOME": ("/nonexistent", "/dev/null"),
    "HF_HOME": ("/nonexistent", "/dev/null"), "HF_HUB_OFFLINE": ("x",), "OMP_NUM_THREADS": ("1",), "USER": (None,),
    "MPLCONFIGDIR": ("/nonexistent",), "TORCHINDUCTOR_CACHE_DIR": ("/nonexistent",), "HF_TOKEN": ("\x1b[2J",),
}  # fmt: skip
"""Variables of the environment, and odd values of them; None removes one."""


def environment(random: Random, material: Path, work: Path) -> Case:
    """A command that was started in odd surroundings: variables, and streams that are closed."""
    chosen = random.sample(sorted(VARIABLES), random.choice((0, 1, 2)))
    variables = {name: random.choice(VARIABLES[name]) for name in chosen}
    closed = tuple(random.sample((0, 1, 2), random.choice((0, 1, 1, 2, 3)) if chosen else 1))
    hybrid = shutil.copytree(material / "artifacts" / "vit", work / "hybrid")
    convert = ("convert", material / "models" / "vit", "--calib", material / "photos", *FEW, "--kernel", "latte")
    command = random.choice((
        ("inspect", hybrid), ("inspect", hybrid, "--json"), ("verify", hybrid), ("report", hybrid, "--plots"),
        ("restore", hybrid, "--out", "out"), (*convert, "--out", "out"), ("score", *convert[1:], "--json"), ("schema",),
        ("verify", "nowhere"), ("--help",), ("--version",), (),
    ))  # fmt: skip
    codes = (0, 2, 3) if 1 in closed or not command else (0, 3)
    runs = [run(*command, codes=codes, absent=work / "out", variables=variables, closed=closed)]
    return Case("environment", f"{variables}, closed {closed}: {command[:1]}", runs)
