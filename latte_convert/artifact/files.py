"""Files that must be whole or absent: hashing, strict JSON, and an atomic directory write."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latte_convert.errors import OutputError


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write strict, stable JSON: no NaN, UTF-8, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def check_target(out: Path, *, overwrite: bool, needed_bytes: int = 0) -> None:
    """Refuse an output that could not be written, before any work is done for it.

    Raises:
        OutputError: ``out`` exists and ``overwrite`` is off, its parent cannot be written, or the disk is too full.
    """
    if os.path.lexists(out) and not overwrite:
        raise OutputError(f"{out} exists already. Choose another --out, or pass --overwrite to replace it.")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out} is not a directory; it will not be replaced. Choose another --out.")
    parent = _existing_parent(out)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} cannot be written to. Choose another --out.")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            f"{out} needs about {needed_bytes / 1e6:.0f} MB, and {parent} has {free / 1e6:.0f} MB free. Make room, or "
            "choose another --out."
        )


def _existing_parent(out: Path) -> Path:
    parent = out.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    return parent


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory that appears whole or not at all.

    Yields a temporary sibling to write into. On success it is flushed to disk and renamed to ``out``; on any failure,
    Ctrl-C included, it is removed, and what was at ``out`` before is untouched.

    Raises:
        OutputError: ``out`` exists and ``overwrite`` is off, or writing failed (a full disk).
    """
    check_target(out, overwrite=overwrite)
    out = out.absolute()
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.tmp-", dir=out.parent))
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        for path in temporary.rglob("*"):
            _fsync(path)
        _fsync(temporary)
        _swap(temporary, out)
        _fsync(out.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else (error.strerror or str(error))
        raise OutputError(f"{out} was not written: {reason}. Nothing that was there before has changed.") from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, out: Path) -> None:
    """Move ``temporary`` to ``out``. An old directory steps aside first and comes back if that fails."""
    if not out.exists():
        temporary.rename(out)
        return
    aside = temporary.with_name(temporary.name + ".old")
    out.rename(aside)
    try:
        temporary.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
