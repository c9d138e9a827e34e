"""Locks that die with their holder: they tell what a killed run left from what another run is still writing.

A process number says nothing on a shared disk or across containers. ``flock`` is kept by the system that opened the
file; the end of the process releases it, however that comes about, and file servers pass it on.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latte_convert.errors import OutputError

_PATIENCE = 60.0
"""Seconds to wait for another run; it holds the lock of an artifact for milliseconds."""


def _lock(descriptor: int) -> bool | None:
    """Lock an open file: whether that worked, or None where the system or the disk has no such locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one that a path leads to."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _prefix(target: Path) -> str:
    """How temporary names beside a target begin; a long name is shortened, so that they fit where it fits."""
    name = target.name
    if len(os.fsencode(name)) > 100:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return f".{name}.tmp-"


def folder_of(claimed: Path) -> Path:
    """The folder that goes with a claimed file: what will take the place of its target."""
    return claimed.with_name(claimed.name + ".new")


def aside_of(claimed: Path) -> Path:
    """Where the old folder lies for the moment between two renames."""
    return claimed.with_name(claimed.name + ".old")


@contextmanager
def claim(target: Path) -> Iterator[Path]:
    """A hidden file beside ``target``, locked while the context lasts, then removed with the folders that go with it.

    The folder of ``target`` must exist. What is renamed meanwhile stays.
    """
    while True:
        path = target.with_name(_prefix(target) + secrets.token_hex(4))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Before it was locked, another run could take it for a dead one's.
        if _lock(descriptor) is not False and _is_at(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield path
    finally:
        try:
            _settle(path, target)
            if _is_at(descriptor, path):
                path.unlink()
        finally:
            os.close(descriptor)


def _settle(claimed: Path, target: Path) -> None:
    """Remove the folders of a claim; of a target that lies aside, the new one, which is complete, takes the place."""
    new, old = folder_of(claimed), aside_of(claimed)
    if old.is_dir() and not os.path.lexists(target):
        (new if new.is_dir() else old).rename(target)
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def abandoned(folder: Path, pattern: str = ".*.tmp-*") -> Iterator[list[Path]]:
    """The claimed files in a folder whose runs are dead, locked while the context lasts."""
    found: dict[Path, int] = {}
    try:
        for path in folder.glob(pattern):
            if path.is_symlink() or not path.is_file():
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            if _lock(descriptor) and _is_at(descriptor, path):
                found[path] = descriptor
            else:
                os.close(descriptor)
        yield list(found)
    finally:
        for descriptor in found.values():
            os.close(descriptor)


def recover(target: Path) -> None:
    """Finish what a killed run had completed beside a target folder or file, and remove the rest of what it left.

    A run that is still alive keeps its own. Where two renames exchange folders, a kill between them leaves no
    ``target``: then the new one, which is complete, takes its place.
    """
    with abandoned(target.parent, f"{glob.escape(_prefix(target))}*") as claims:
        for path in claims:
            _settle(path, target)
            if not folder_of(path).exists():
                path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only run that changes a file which is replaced by renames; without a lock where the disk has none.

    Raises:
        OutputError: Another run has held it for a minute.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            path = path.resolve()  # in the Hub's cache files are links
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # a read-only disk: nothing will change there
            yield
            return
        held = _lock(descriptor)
        if held is None or (held and _is_at(descriptor, path)):
            break
        os.close(descriptor)
        if time.monotonic() > until:
            raise OutputError(f"another run of latte is writing to {path.parent}. Try again when it has ended.")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(descriptor)
