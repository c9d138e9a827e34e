"""Where samples come from: what is in a folder, a table or an archive, and how to read one entry of it."""

from __future__ import annotations

import logging
import mimetypes
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol

from latte_convert.data.columns import COLUMNS, cell_content, choose_column, find_column, read_file
from latte_convert.data.decode import MOST_BYTES, PLURAL, SUFFIXES, BadSample, Modality
from latte_convert.data.tables import SUFFIXES as SUFFIXES_OF_TABLES
from latte_convert.data.tables import Lines, Table, open_table
from latte_convert.errors import DataError, nearest
from latte_convert.reading import Unreadable, check_file

logger = logging.getLogger("latte_convert")

TABLE_SUFFIXES = (".txt", *SUFFIXES_OF_TABLES, ".tar")
_WORDS_OF_A_SENTENCE = 4
_KNOWN = frozenset(TABLE_SUFFIXES).union(*SUFFIXES.values())
_FOREIGN = frozenset(
    [
        ".aac",
        ".amr",
        ".arw",
        ".cr2",
        ".cr3",
        ".dng",
        ".doc",
        ".docx",
        ".epub",
        ".exr",
        ".heic",
        ".heif",
        ".jxl",
        ".m4a",
        ".m4v",
        ".mkv",
        ".nef",
        ".odt",
        ".pdf",
        ".psd",
        ".raw",
        ".rtf",
        ".tga",
        ".webm",
        ".wma",
    ]
)
"""Media and documents that not every Python knows as such."""


class Source(Protocol):
    """Candidates that can be named unread, and read one by one in any order, again and again."""

    def __len__(self) -> int: ...

    def id(self, index: int) -> str:
        """Stable name of a candidate, the same on every machine."""

    def read(self, index: int) -> bytes | str:
        """Encoded content of a candidate; raises BadSample with the reason where there is none."""


def open_local(path: Path, modality: Modality) -> Source:
    """The source at an existing path.

    Raises:
        DataError: It is empty, unreadable, or of another modality.
    """
    try:
        return Folder(path, modality) if path.is_dir() else _open_file(path, modality)
    except (OSError, Unreadable) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _open_file(path: Path, modality: Modality) -> Source:
    suffix = path.suffix.lower()
    check_file(path)
    if suffix == ".txt" and modality != "text":
        raise DataError(f"{path} is a text file; this model takes {PLURAL[modality]}: give a folder of them")
    if suffix == ".txt":
        return TableRows(Lines(path), modality)
    if suffix in SUFFIXES_OF_TABLES:
        return TableRows(open_table(path, headless=partial(_headless, modality=modality)), modality)
    if suffix == ".tar":
        return TarMembers(path, modality)
    if suffix in SUFFIXES[modality]:
        raise DataError(f"{path} is one file; give the folder that holds your samples")
    raise DataError(
        f"{path}: cannot read samples from a {suffix or 'suffixless'} file; give a folder "
        f"of {PLURAL[modality]} or one of {', '.join(TABLE_SUFFIXES)}"
    )


def missing_path(source: str) -> DataError:
    """The error for a path that is not there, with what is there instead."""
    path = Path(source)
    parent = next(p for p in path.absolute().parents if p.is_dir())
    absent = path.absolute().relative_to(parent).parts[0]
    try:
        siblings = sorted(entry.name for entry in parent.iterdir() if not _hidden(entry.name))
    except OSError:
        siblings = []
    message = f"no such file or folder: {source} ('{absent}' in {parent}: {nearest(absent, siblings)})"
    if not looks_like_path(source):
        message += f". For a dataset of the Hub write hf:{source}"
    return DataError(message)


def looks_like_path(source: str) -> bool:
    """Whether a string is written as a path, which is never the name of a Hub dataset."""
    return (
        source.startswith((".", "~", "/", "\\"))
        or source.endswith(("/", "\\"))
        or Path(source).is_absolute()
        or _suffix(source) in _KNOWN
    )


class Folder:
    """Files of one modality under a folder, nested ones included; hidden files do not count.

    Media of a format that is not read are candidates too, so that they are skipped by name.
    """

    def __init__(self, path: Path, modality: Modality) -> None:
        files = list(_walk(path))
        self._names = sorted(_candidates(str(path), files, modality))
        self.path, self._modality = path, modality

    def __len__(self) -> int:
        return len(self._names)

    def id(self, index: int) -> str:
        """Path relative to the folder, with slashes."""
        return self._names[index]

    def read(self, index: int) -> bytes:
        """Bytes of one file."""
        _check_suffix(self._names[index], self._modality)
        return read_file(self.path / self._names[index], self._modality)


def _candidates(where: str, names: list[str], modality: Modality) -> list[str]:
    """Files of a modality, and media whose format is not read.

    Raises:
        DataError: There is no file of the modality.
    """
    if not any(_suffix(name) in SUFFIXES[modality] for name in names):
        raise _nothing_wanted(where, names, modality)
    return [name for name in names if _suffix(name) in SUFFIXES[modality] or _is_foreign(name)]


def _is_foreign(name: str) -> bool:
    """Whether a file holds an image, sound, film or document of a format that is not read."""
    if _suffix(name) in _KNOWN:
        return False
    kind = mimetypes.guess_type(name)[0] or ""
    return kind.startswith(("image/", "audio/", "video/")) or _suffix(name) in _FOREIGN


def _check_suffix(name: str, modality: Modality) -> None:
    if _suffix(name) not in SUFFIXES[modality]:
        raise BadSample(f"a {_suffix(name)} file, which is not read as {PLURAL[modality]}")


def _walk(root: Path) -> Iterator[str]:
    """Relative posix paths of the regular files; a folder that links lead to twice counts once."""
    seen: set[tuple[int, int]] = set()

    def unlistable(error: OSError) -> None:
        logger.warning("cannot list %s: %s", error.filename, error.strerror)

    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=unlistable):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        # Sorted, so that which of two ways to the same folder counts does not depend on the disk.
        subfolders[:] = sorted(name for name in subfolders if not _hidden(name))
        relative = Path(folder).relative_to(root)
        for name in names:
            if not _hidden(name) and not _special(os.path.join(folder, name)):
                yield (relative / name).as_posix()


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _special(path: str) -> bool:
    """Whether reading would block or mean nothing (pipe, device); a broken link fails when it is read."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _nothing_wanted(source: str, names: list[str], modality: Modality) -> DataError:
    takes = f"this model takes {PLURAL[modality]} ({', '.join(sorted(SUFFIXES[modality]))})"
    if not names:
        return DataError(f"{source} is empty (hidden files do not count); {takes}")
    counts = Counter(_suffix(name) or "suffixless" for name in names)
    there = ", ".join(f"{count} {suffix} file{'s' * (count > 1)}" for suffix, count in counts.most_common(3))
    tables = sorted(name for name in names if _suffix(name) in TABLE_SUFFIXES)
    hint = f". To read one of its files give that, for instance {source}/{tables[0]}" if tables else ""
    return DataError(f"{source}: {there}; {takes}{hint}")


class TarMembers:
    """Members of an uncompressed archive, such as a webdataset shard; listing them reads only headers."""

    def __init__(self, path: Path, modality: Modality) -> None:
        members: dict[str, tuple[int, int]] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    if member.isreg() and not any(map(_hidden, PurePosixPath(member.name).parts)):
                        members[PurePosixPath(member.name).as_posix()] = (member.offset_data, member.size)
        except tarfile.TarError as error:
            if not members:
                raise DataError(f"{path} is not a plain .tar ({error}); unpack a compressed one") from error
            logger.warning("%s is damaged after %d members: %s", path, len(members), error)
        self.path, self._modality = path, modality
        self._members = sorted((name, members[name]) for name in _candidates(str(path), list(members), modality))

    def __len__(self) -> int:
        return len(self._members)

    def id(self, index: int) -> str:
        """Name of the member."""
        return self._members[index][0]

    def read(self, index: int) -> bytes:
        """Bytes of one member."""
        name, (offset, size) = self._members[index]
        _check_suffix(name, self._modality)
        if size > MOST_BYTES[self._modality]:
            raise BadSample(
                f"it has {size / 1e6:,.0f} MB, and at most {MOST_BYTES[self._modality] / 1e6:,.0f} MB are read"
            )
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise BadSample(f"cannot read {self.path.name}: {error.strerror}") from error
        if len(content) < size:
            raise BadSample("the archive ends inside this member")
        return content


class TableRows:
    """One column of a table: texts, or the names of files relative to its folder."""

    def __init__(self, table: Table, modality: Modality) -> None:
        self._table, self._modality = table, modality
        self._column = choose_column(table.names(COLUMNS[modality]), modality, table.path.name)

    def __len__(self) -> int:
        return len(self._table)

    def id(self, index: int) -> str:
        """File name and number of the row."""
        return f"{self._table.path.name}:{self._table.number(index)}"

    def read(self, index: int) -> bytes | str:
        """Content of one row, or of the file it names."""
        folder = self._table.path.parent
        return cell_content(
            self._table.cell(index, self._column), self._modality, lambda name: read_file(folder / name, self._modality)
        )


def _headless(first: list[str], modality: Modality) -> list[str] | None:
    """A first row without a known name is data if it holds a number, or a cell of four words or more."""
    if find_column(first, COLUMNS[modality]) is not None or not any(map(_is_data, first)):
        return None
    return [COLUMNS[modality][0]]


def _is_data(field: str) -> bool:
    if len(field.split()) >= _WORDS_OF_A_SENTENCE:
        return True
    try:
        float(field)
    except ValueError:
        return False
    return True
