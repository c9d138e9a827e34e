"""Samples in the lines of one ``.txt``, ``.jsonl`` or ``.csv`` file, read one line at a time.

The loaders of ``datasets`` fail a whole file for one bad line and cannot say which; here every record has its
own place in the file, so that a bad one is skipped by name and any one can be read again without the rest.
"""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from latte_convert.data.decode import PLURAL, BadSample, Modality, clean_text, decode_text
from latte_convert.errors import DataError

_COLUMNS: dict[Modality, str] = {
    "text": "text sentence s1 sentence1 caption transcript transcription content prompt",
    "image": "image img file_name path jpg jpeg png webp",
    "audio": "audio file_name path wav flac mp3 ogg",
}
COLUMNS = {modality: tuple(names.split()) for modality, names in _COLUMNS.items()}
_WORDS_OF_A_SENTENCE = 4


def find_column(names: Iterable[str], modality: Modality) -> str | None:
    """The first column of ``COLUMNS[modality]`` that is there, whatever its case, as it is spelt there."""
    spelt = {name.strip().lower(): name for name in reversed(list(names))}
    return next((spelt[name] for name in COLUMNS[modality] if name in spelt), None)


def choose_column(names: Iterable[str], modality: Modality, where: str) -> str:
    """The column to read.

    Raises:
        DataError: None of the names is one this modality is known by; it lists those found.
    """
    names = list(names)
    column = find_column(names, modality)
    if column is None:
        found = ", ".join(repr(name) for name in names[:10]) or "no names"
        raise DataError(
            f"{where}: no column or key to read {PLURAL[modality]} from; it has {found}. "
            f"Rename one to '{COLUMNS[modality][0]}' (also known: {', '.join(COLUMNS[modality][1:])})"
        )
    return column


def cell_content(cell: object, modality: Modality, read_path: Callable[[str], bytes]) -> bytes | str:
    """What a cell stands for: text itself, or the bytes of a file held in it or named by it.

    Args:
        cell: A string, bytes, or the ``{"bytes", "path"}`` of an undecoded ``datasets`` image or audio.
        modality: What the cell should hold.
        read_path: Reads the file that a cell names.

    Raises:
        BadSample: The cell is empty or of another type.
    """
    if modality == "text":
        if not isinstance(cell, str):
            raise BadSample("no text in it" if cell is None else f"{type(cell).__name__} where text should be")
        return clean_text(cell)
    if isinstance(cell, Mapping):
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if isinstance(cell, bytes):
        return cell
    if not isinstance(cell, str) or not cell.strip():
        raise BadSample(f"{cell!r} names no file")
    return read_path(cell.strip())


def read_file(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        BadSample: It cannot be read.
    """
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in a file name that a table gives
        cause = getattr(error, "strerror", None) or error
        raise BadSample(f"cannot read {path.name}: {cause}") from error


class Lines:
    """Text, one sample a line; blank lines separate. Base of the other line formats.

    Memory: 24 bytes a record. A file that names other files gives paths relative to its own folder.
    """

    def __init__(self, path: Path, modality: Modality) -> None:
        self.path, self.modality = path, modality
        self._numbers, self._starts, self._ends = array("q"), array("q"), array("q")
        for number, start, end in self._index():
            self._numbers.append(number)
            self._starts.append(start)
            self._ends.append(end)
        if not self._numbers:
            raise DataError(f"{path.name} is empty; give a file with one sample a line")

    def __len__(self) -> int:
        return len(self._numbers)

    def id(self, index: int) -> str:
        """File name and number of the record, counted from 1: the line, or the row of a CSV."""
        return f"{self.path.name}:{self._numbers[index]}"

    def read(self, index: int) -> bytes | str:
        """Content of one record.

        Raises:
            BadSample: The record, or the file it names, cannot be read.
        """
        return cell_content(self._cell(self._record(index)), self.modality, self._read_named)

    def _read_named(self, name: str) -> bytes:
        return read_file(self.path.parent / name)

    def _record(self, index: int) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[index])
                raw = file.read(self._ends[index] - self._starts[index])
        except OSError as error:
            raise BadSample(f"cannot read {self.path.name}: {error.strerror}") from error
        return decode_text(raw)

    def _index(self) -> Iterator[tuple[int, int, int]]:
        """Number, first byte and end of every record that is not blank."""
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, start, start + len(line)
                start += len(line)

    def _cell(self, record: str) -> object:
        return record


class JsonLines(Lines):
    """One JSON object a line. The first line that has a known key decides which key is read."""

    def __init__(self, path: Path, modality: Modality) -> None:
        super().__init__(path, modality)
        self._key = self._find_key()

    def _find_key(self) -> str:
        seen: dict[str, None] = {}
        reason = ""
        for index in range(len(self)):
            try:
                item = self._object(self._record(index))
            except BadSample as error:
                reason = reason or f"{self.id(index)}: {error}"
                continue
            key = find_column(item, self.modality)
            if key is not None:
                return key
            seen.update(dict.fromkeys(item))
        if not seen:
            raise DataError(f"{self.path.name}: no line holds a JSON object with keys ({reason or '{}'})")
        return choose_column(seen, self.modality, self.path.name)

    @staticmethod
    def _object(record: str) -> dict[str, object]:
        try:
            item = json.loads(record)
        except (ValueError, RecursionError) as error:
            raise BadSample(f"not valid JSON: {error}") from error
        if not isinstance(item, dict):
            raise BadSample(f"JSON {type(item).__name__} where an object should be")
        return item

    def _cell(self, record: str) -> object:
        item = self._object(record)
        if self._key not in item:
            raise BadSample(f"no key '{self._key}'; it has {', '.join(map(repr, item)) or 'none'}")
        return item[self._key]


class CsvRows(Lines):
    """Comma-separated rows, numbered as a spreadsheet does.

    The first row is a header if one of its names is known. Otherwise, if it holds a number or a cell of four
    words or more, it is data: the file has no header and its first column is read. Anything else is an
    error that lists the names found.
    """

    def __init__(self, path: Path, modality: Modality) -> None:
        super().__init__(path, modality)
        self._column = 0
        try:
            first = self._fields(self._record(0))
        except BadSample as error:
            raise DataError(f"{self.id(0)}: {error}; the first row must be readable") from error
        if find_column(first, modality) is None and any(map(_is_data, first)):
            return
        self._column = first.index(choose_column(first, modality, path.name))
        for places in (self._numbers, self._starts, self._ends):
            del places[0]
        if not self._numbers:
            raise DataError(f"{path.name} has a header and no rows; give a file with one sample a row")

    def _index(self) -> Iterator[tuple[int, int, int]]:
        end = 0

        def lines() -> Iterator[str]:
            nonlocal end
            with self.path.open("rb") as file:
                for line in file:
                    end += len(line)
                    # Bad bytes pass here, so that just their row is skipped when it is read.
                    yield line.decode("utf-8", "replace").removeprefix("\ufeff")

        rows = csv.reader(lines())
        number = 0
        while True:
            number, start = number + 1, end
            try:
                fields = next(rows)
            except StopIteration:
                return
            except csv.Error:  # reported when the row is read; the reader goes on with the next line
                yield number, start, end
                continue
            if any(field.strip() for field in fields):
                yield number, start, end

    @staticmethod
    def _fields(record: str) -> list[str]:
        try:
            # Strict, so that a quote that is never closed is an error and not one endless field.
            return next(csv.reader(io.StringIO(record, newline=""), strict=True))
        except csv.Error as error:
            raise BadSample(f"not a valid CSV row: {error}") from error

    def _cell(self, record: str) -> object:
        fields = self._fields(record)
        if self._column >= len(fields):
            raise BadSample(f"only {len(fields)} columns, number {self._column + 1} is wanted")
        return fields[self._column]


def _is_data(cell: str) -> bool:
    if len(cell.split()) >= _WORDS_OF_A_SENTENCE:
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return True
