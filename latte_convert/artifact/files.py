"""Files that must be whole or absent: hashing, strict JSON, and an atomic directory write."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latte_convert.errors import OutputError
from latte_convert.names import MANIFEST


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write strict, stable JSON: no NaN, ASCII, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_document(content: Any, path: Path) -> None:
    """Write a JSON document, whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    write_file(path, lambda temporary: write_json(temporary, content))


def write_text(text: str, path: Path) -> None:
    """Write a page as UTF-8, whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    write_file(path, lambda temporary: temporary.write_bytes(text.encode()))


def write_file(path: Path, fill: Callable[[Path], object]) -> None:
    """Write a file, whole or not at all: ``fill`` is given a temporary sibling.

    Raises:
        OutputError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            fill(temporary)
            temporary.chmod(path.stat().st_mode if path.exists() else 0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} was not written: {error.strerror or error}.") from error


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
    target = out.resolve()
    for path in (*protect, Path.cwd()):
        if target == path.resolve() or target in path.resolve().parents:
            raise OutputError(f"{out} holds {path}, which would be lost. Choose another --out.")
    if out.is_symlink() or (os.path.lexists(out) and not out.is_dir()):
        raise OutputError(f"{out} is not a directory; it will not be replaced. Choose another --out.")
    if os.path.lexists(out) and not overwrite:
        raise OutputError(f"{out} exists already. Choose another --out, or pass --overwrite to replace it.")
    if out.is_dir() and not _is_ours(out, known):
        raise OutputError(
            f"{out} was not written by latte, so --overwrite does not replace it. Choose another --out, or remove it."
        )
    parent = _existing_parent(out)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} cannot be written to. Choose another --out.")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(
            f"{out} needs about {needed_bytes / 1e6:.0f} MB, and {parent} has {free / 1e6:.0f} MB free. Make room, or "
            "choose another --out."
        )


def _is_ours(directory: Path, known: Collection[str]) -> bool:
    """Whether a directory is empty, an artifact, or holds nothing but files that are known."""
    if (directory / MANIFEST).is_file():
        return True
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir() or p.is_symlink()}
    return files <= set(known)


def _existing_parent(out: Path) -> Path:
    parent = out.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    return parent


@contextmanager
def atomic_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory that appears whole or not at all; ``check_target`` comes first.

    Yields a temporary sibling to write into. On success it is flushed to disk and takes the place of ``out`` in one
    step; on any failure, Ctrl-C included, it is removed, and what was at ``out`` before is untouched.

    Raises:
        OutputError: ``out`` has appeared meanwhile and ``overwrite`` is off, or writing failed (a full disk).
    """
    from safetensors import SafetensorError

    out = out.absolute()
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.tmp-{os.getpid()}-", dir=out.parent))
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        for path in temporary.rglob("*"):
            _fsync(path)
        _fsync(temporary)
        _swap(temporary, out, overwrite=overwrite)
        _fsync(out.parent)
    except FileExistsError:
        raise OutputError(f"{out} has appeared meanwhile; it was left alone. Choose another --out.") from None
    except (OSError, SafetensorError) as error:
        full = "No space left" in str(error) or getattr(error, "errno", None) in (errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
        raise OutputError(f"{out} was not written: {reason}. Nothing that was there before has changed.") from error
    finally:
        # After a swap this is the old directory.
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, out: Path, *, overwrite: bool) -> None:
    """Move ``temporary`` to ``out``; an old directory is exchanged for it, so that there is never none.

    Raises:
        FileExistsError: ``out`` exists and ``overwrite`` is off.
    """
    exists = os.path.lexists(out)
    if exists and not overwrite:
        raise FileExistsError(errno.EEXIST, "exists", str(out))
    if not exists:
        temporary.rename(out)
    elif not _exchange(temporary, out):
        # Two renames where the system cannot exchange: a kill between them leaves the old one beside, complete.
        aside = temporary.with_name(temporary.name + ".old")
        out.rename(aside)
        try:
            temporary.rename(out)
        except BaseException:
            if not out.exists():
                aside.rename(out)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step (Linux ``renameat2``); False where that cannot be done."""
    at_fdcwd, exchange = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), exchange) == 0)


def _remove_stale(out: Path) -> None:
    """Remove what a killed run left beside ``out``; a run that is still alive keeps its own."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.tmp-*"):
        pid = path.name.rpartition(".tmp-")[2].partition("-")[0]
        if pid.isdecimal() and not _alive(int(pid)) and not path.name.endswith(".old"):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


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
