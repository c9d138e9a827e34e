"""What is measured of an artifact and kept in it: every file of results is recorded in the manifest by its digest.

A file and its record change together. New files are written under hidden names, then the manifest that records them
takes the place of the old one: that is the moment at which they count. A run that is killed before it leaves hidden
files to remove; one that is killed after it, hidden files that the manifest records and that only wait for their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from latte_convert.artifact.files import flush, why, write_json
from latte_convert.artifact.locks import abandoned, claim, locked, recover
from latte_convert.artifact.manifest import Manifest, read_manifest
from latte_convert.errors import IntegrityError, OutputError
from latte_convert.names import MANIFEST
from latte_convert.reading import MOST_BYTES, sha256_file

Fill = Callable[[Path], object]
"""Writes the content of a file to the path that it is given."""


def home_of(path: Path) -> Path | None:
    """The artifact that a file lies in, or would lie in."""
    place = path.parent.resolve()
    return next((folder for folder in (place, *place.parents) if (folder / MANIFEST).is_file()), None)


def name_in(home: Path, path: Path) -> str:
    """A file's name in the records of an artifact: relative, with slashes. A link is recorded, not what it leads to."""
    return (path.parent.resolve() / path.name).relative_to(home).as_posix()


def write_document(content: Any, path: Path) -> None:
    """Write a JSON document; see ``write_files``."""
    write_files({path: lambda temporary: write_json(temporary, content)})


def write_text(text: str, path: Path) -> None:
    """Write a page as UTF-8; see ``write_files``."""
    write_files({path: lambda temporary: temporary.write_bytes(text.encode())})


def write_files(fills: Mapping[Path, Fill]) -> None:
    """Write files, each whole or not at all; those inside an artifact together, and with their record in it.

    Raises:
        OutputError: A file cannot be written; the files that were there are untouched.
        IntegrityError: A file lies in an artifact whose manifest cannot be read.
    """
    path = next(iter(fills))
    try:
        with ExitStack() as stack:
            written: dict[Path, Path] = {}
            for path, fill in fills.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                settle(home) if (home := home_of(path)) else recover(path)
                written[path] = temporary = stack.enter_context(claim(path))
                fill(temporary)
                if path.exists():
                    temporary.chmod(path.stat().st_mode & 0o777)
                flush(temporary)
            for home in {home_of(path) for path in written}:
                _publish(home, {path: temporary for path, temporary in written.items() if home_of(path) == home})
    except OSError as error:
        raise OutputError(f"{path} was not written: {why(error)}.") from error


def _publish(home: Path | None, written: Mapping[Path, Path]) -> None:
    """Give written files their names, and record them in the artifact they belong to."""
    if home is None:
        for path, temporary in written.items():
            temporary.replace(path)
        return

    def record(manifest: Manifest) -> Manifest:
        digests = {name_in(home, path): sha256_file(temporary) for path, temporary in written.items()}
        return manifest.model_copy(update={"results": dict(sorted({**manifest.results, **digests}.items()))})

    with locked(home / MANIFEST):
        _write_manifest(home, record(read_manifest(home)))
        for path, temporary in written.items():
            temporary.replace(path)


def update_manifest(home: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Change the manifest of an artifact, whole or not at all; returns the new one.

    Raises:
        OutputError: It cannot be written.
        IntegrityError: It cannot be read.
    """
    try:
        with locked(home / MANIFEST):
            manifest = change(read_manifest(home))
            _write_manifest(home, manifest)
    except OSError as error:
        raise OutputError(f"{home / MANIFEST} was not written: {why(error)}.") from error
    return manifest


def _write_manifest(home: Path, manifest: Manifest) -> None:
    path = home / MANIFEST
    with claim(path) as temporary:
        write_json(temporary, manifest.model_dump(mode="json"))
        temporary.chmod(path.stat().st_mode & 0o777)
        flush(temporary)
        temporary.replace(path)
    flush(home)


def settle(home: Path) -> None:
    """Finish what killed runs had recorded in an artifact, and remove the rest of what they left there."""
    for folder in {home, *((home / name).parent for name in read_manifest(home).results)}:
        with locked(home / MANIFEST), abandoned(folder) as left:
            results = read_manifest(home).results if left else {}
            for temporary in left:
                digest = sha256_file(temporary)
                waiting = [home / name for name, recorded in results.items() if recorded == digest]
                path = next((path for path in waiting if path.parent == folder and not _is(path, digest)), None)
                temporary.replace(path) if path else temporary.unlink()


def check_result(path: Path) -> None:
    """Compare a file with what the artifact it lies in records of it; a file that is not recorded is left alone.

    Raises:
        IntegrityError: It is another one than was written there.
    """
    home = home_of(path)
    if home is None:
        return
    settle(home)
    with locked(home / MANIFEST):
        recorded = read_manifest(home).results.get(name_in(home, path))
        changed = recorded is not None and not _is(path, recorded)
    if changed:
        raise IntegrityError(
            f"{path} is not the file that latte wrote there: it was changed or swapped. Measure again, or get the "
            "artifact anew."
        )


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and path.stat().st_size <= MOST_BYTES and sha256_file(path) == digest
