"""Files that must be whole or absent: hashing, strict JSON, and an atomic directory write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from latte_convert import compat
from latte_convert.artifact.locks import aside_of, claim, folder_of, recover
from latte_convert.errors import OutputError
from latte_convert.names import MANIFEST
from latte_convert.reading import is_utf8

_LONGEST_NAME = 100
"""Bytes of what this tool names itself."""
_SHOWN = 200
"""Letters of a name in a message."""


def visible(directory: Path) -> list[str]:
    """Every file below a directory that is not hidden: its name relative to it, sorted."""
    found = (file.relative_to(directory) for file in directory.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(name.as_posix() for name in found if not any(part.startswith(".") for part in name.parts))


def write_json(path: Path, content: Any) -> None:
    """Write strict, stable JSON: no NaN, ASCII, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def check_target(
    out: Path,
    *,
    overwrite: bool,
    needed_bytes: int = 0,
    protect: Iterable[Path] = (),
    known: Collection[str] = (),
) -> None:
    """Refuse an output that could not be written, or that would destroy something, before any work is done for it.

    Args:
        out: Directory to create.
        overwrite: Whether it may replace what this tool wrote there before. Nothing else is ever replaced.
        needed_bytes: Free space it takes.
        protect: What must survive: ``out`` may neither be one of these nor hold one.
        known: Files that mark an existing directory as ours although it has no manifest.

    Raises:
        OutputError: ``out`` exists and may not be replaced, its parent cannot be written, or the disk is too full.
    """
    parent = check_place(out)
    with suppress(OSError):  # another run's leftovers are its own affair
        recover(out.absolute())
    target = _real(out)
    for path in (*protect, Path.cwd()):
        if target == _real(path) or target in _real(path).parents:
            raise OutputError(f"{out} holds {path}, which would be lost. Choose another --out.")
    if out.is_symlink() or (os.path.lexists(out) and not out.is_dir()):
        raise OutputError(f"{out} is not a directory; it will not be replaced. Choose another --out.")
    if os.path.lexists(out) and not overwrite:
        raise OutputError(f"{out} exists already. Choose another --out, or pass --overwrite to replace it.")
    if out.is_dir() and not _is_ours(out, known):
        raise OutputError(
            f"{out} was not written by latte, so --overwrite does not replace it. Choose another --out, or remove it."
        )
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            f"{out} needs about {needed_bytes / 1e6:.0f} MB, and {parent} has {free / 1e6:.0f} MB free. Make room, or "
            "choose another --out."
        )


def check_outside(out: Path, source: Path) -> None:
    """Refuse an output inside the artifact that it is made from, whose manifest does not name what would lie there.

    Raises:
        OutputError: It lies there.
    """
    if (source / MANIFEST).is_file() and _real(source) in _real(out).parents:
        raise OutputError(f"{out} lies in the artifact {source}, which would no longer verify. Choose another --out.")


def _real(path: Path) -> Path:
    """Where a path leads; a link to itself leads nowhere, at which ``Path.resolve`` of older Pythons fails."""
    return Path(os.path.realpath(path))


def check_place(path: Path) -> Path:
    """Refuse a file or folder that could not be written, before any work is done for it.

    Returns:
        The nearest folder above it that exists.

    Raises:
        OutputError: Its name is not UTF-8 or too long, or nothing can be written where it would lie.
    """
    whole = path.absolute()
    if not is_utf8(whole):
        raise OutputError(f"the name {str(whole)!a} is not UTF-8, and no report can hold it. Choose another --out.")
    shown = str(path) if len(str(path)) < _SHOWN else f"{str(path)[:_SHOWN]}…"
    try:
        # What goes into a folder, or is renamed to a file, has up to as many letters more.
        with suppress(FileNotFoundError, NotADirectoryError):
            (whole / ("x" * _LONGEST_NAME)).lstat()
        parent = next((folder for folder in whole.parents if os.path.lexists(folder)), whole)  # the root has none
        if not parent.is_dir():
            raise OutputError(f"{shown} cannot be written: {parent} is not a folder. Choose another --out.")
        for part in whole.relative_to(parent).parts:  # each, where a part before it is not there yet
            with suppress(FileNotFoundError, NotADirectoryError):
                (parent / part).lstat()
        with tempfile.TemporaryFile(dir=parent):  # a disk can be read-only, full, or none at all
            pass
    except (OSError, ValueError) as error:
        raise OutputError(f"{shown} cannot be written: {why(error)}. Choose another --out.") from None
    return parent


def _is_ours(directory: Path, known: Collection[str]) -> bool:
    """Whether a directory is empty, an artifact, or holds nothing but files that are known."""
    if (directory / MANIFEST).is_file():
        return True
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir() or p.is_symlink()}
    return files <= set(known)


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory that appears whole or not at all; ``check_target`` comes first.

    Yields a hidden sibling to write into. On success it is flushed to disk and takes the place of ``out`` in one
    step; on any failure, Ctrl-C included, it is removed, and what was at ``out`` before is untouched. What a killed
    run left is removed by the next one.

    Raises:
        OutputError: ``out`` has appeared meanwhile and ``overwrite`` is off, or writing failed (a full disk).
    """
    from safetensors import SafetensorError

    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        recover(out)
        with claim(out) as claimed:
            temporary = folder_of(claimed)
            temporary.mkdir()
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                flush(path)
            _swap(temporary, out, aside_of(claimed), overwrite=overwrite)
            flush(out.parent)
    except FileExistsError:
        raise OutputError(f"{out} has appeared meanwhile; it was left alone. Choose another --out.") from None
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{out} was not written: {why(error)}. Nothing that was there before has changed.") from error


def why(error: Exception) -> str:
    """Why writing failed, as a clause."""
    full = "No space left" in str(error) or getattr(error, "errno", None) in (errno.EDQUOT, errno.EFBIG)
    return "the disk is full" if full else str(getattr(error, "strerror", None) or error)


def _swap(temporary: Path, out: Path, aside: Path, *, overwrite: bool) -> None:
    """Move ``temporary`` to ``out``; an old directory is exchanged for it, so that there always is one.

    Raises:
        FileExistsError: ``out`` exists and ``overwrite`` is off.
    """
    exists = os.path.lexists(out)
    if exists and not overwrite:
        raise FileExistsError(errno.EEXIST, "exists", str(out))
    if not exists:
        temporary.rename(out)
    elif not compat.exchange(temporary, out):
        # Two renames where the system cannot exchange; ``recover`` finishes them after a kill in between.
        out.rename(aside)
        try:
            temporary.rename(out)
        except BaseException:
            if not out.exists():
                aside.rename(out)
            raise


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
