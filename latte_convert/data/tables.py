"""Rows of a file: each is found once and read on demand, so that a bad one is skipped or named without the rest.

The loaders of ``datasets`` fail a whole file for one bad line and cannot say which. Memory: 24 bytes a row.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from latte_convert.compat import require
from latte_convert.data.columns import find_column
from latte_convert.data.decode import BadSample, decode_utf8
from latte_convert.errors import DataError
from latte_convert.reading import Unreadable, check_file, parse_json

Row = dict[str, Any]
Headless = Callable[[list[str]], Sequence[str] | None]
"""Names of the columns of a file whose first record is a row already; None where that record is the header."""

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITED = (".csv", ".tsv", ".txt", ".token")
_MOST_BYTES = 16 << 20
_BATCH_BYTES = 8 << 20


class Table(ABC):
    """The rows of one file.

    Args:
        path: The file.

    Raises:
        DataError: It cannot be read, or has no rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def number(self, index: int) -> int:
        """What a message calls a row: its first line, from 1; in a parquet file its place, from 0."""

    @abstractmethod
    def names(self, known: Collection[str]) -> Sequence[str]:
        """Names of the columns; where each row names its own, those of the first row that has one of ``known``."""

    @abstractmethod
    def cell(self, index: int, column: str) -> Any:
        """One cell.

        Raises:
            BadSample: The row cannot be read, or has no such column.
        """

    @abstractmethod
    def _rows(self) -> Iterator[Row]: ...

    def rows(self) -> Iterator[tuple[str, Row]]:
        """``FILE:NUMBER`` and contents of every row.

        Raises:
            DataError: A row cannot be read; names it.
        """
        found, where = self._rows(), f"{self.path}"
        try:
            for index in range(len(self)):
                where = f"{self.path}:{self.number(index)}"
                yield where, next(found)
        except BadSample as error:
            raise DataError(f"{where}: {error}.") from error


def open_table(path: Path, *, headless: Headless | None = None, marks: str = "") -> Table:
    """The table in a ``.csv``, ``.tsv``, ``.jsonl`` or ``.parquet`` file, or in a text whose lines are delimited.

    Args:
        path: The file.
        headless: Says whether the first record of a delimited file is its header; None where it always is.
        marks: Delimiters other than the comma of such a file, the likelier first; the first line says which it is.

    Raises:
        DataError: The file is of another kind, cannot be read, or has no rows.
    """
    suffix = path.suffix.lower()
    try:
        check_file(path)
        if suffix == ".jsonl":
            return JsonLines(path)
        if suffix == ".parquet":
            return ParquetTable(path)
        if suffix in _DELIMITED:
            with path.open("rb") as file:
                first = file.readline(_MOST_BYTES).decode("utf-8", "replace")
            marks = "\t" if suffix == ".tsv" else marks
            return Delimited(path, next((mark for mark in marks if mark in first), ","), headless)
    except (OSError, Unreadable) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    raise DataError(f"{path}: rows are read from {', '.join(SUFFIXES)} files, not from '{suffix}'.")


class Lines(Table):
    """Text, one row a line, in a column ``text``; blank lines separate. Base of the other line formats."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._numbers, self._starts, self._ends = array("q"), array("q"), array("q")
        with path.open("rb") as file:
            for number, start, end in self._index(file):
                self._numbers.append(number)
                self._starts.append(start)
                self._ends.append(end)
        if not self._numbers:
            raise DataError(f"{path.name} is empty; give a file with one sample a line")

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        """The first line of a row, from 1."""
        return self._numbers[index]

    def names(self, known: Collection[str]) -> Sequence[str]:
        """The one column."""
        return ["text"]

    def cell(self, index: int, column: str) -> Any:
        """One cell; see ``Table``."""
        row = self._row(self._record(index))
        if column not in row:
            raise BadSample(f"no key '{column}'; it has {', '.join(map(repr, row)) or 'none'}")
        return row[column]

    def _rows(self) -> Iterator[Row]:
        return (self._row(self._record(index)) for index in range(len(self)))

    def _record(self, index: int) -> str:
        start, end = self._starts[index], self._ends[index]
        if end - start > _MOST_BYTES:
            raise BadSample(f"{(end - start) / 1e6:.0f} MB in one row, at most {_MOST_BYTES / 1e6:.0f} MB are read")
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                raw = file.read(end - start)
        except OSError as error:
            raise BadSample(f"cannot read {self.path.name}: {error.strerror}") from error
        return decode_utf8(raw).rstrip("\r\n")

    def _index(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """Number, first byte and end of every row that is not blank."""
        start = 0
        for number, (line, length) in enumerate(_lines(file), start=1):
            if line.removeprefix(b"\xef\xbb\xbf").strip():
                yield number, start, start + length
            start += length

    def _row(self, record: str) -> Row:
        return {"text": record}


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Every line and its length; of a line that is longer than a row may be, the beginning."""
    while line := file.readline(_MOST_BYTES + 1):
        length, rest = len(line), line
        while not rest.endswith(b"\n") and (rest := file.readline(_MOST_BYTES)):
            length += len(rest)
        yield line, length


class JsonLines(Lines):
    """One JSON object a line."""

    def names(self, known: Collection[str]) -> Sequence[str]:
        """The keys of the first object that has one of ``known``, else those of all.

        Raises:
            DataError: No line holds an object with keys.
        """
        seen: dict[str, None] = {}
        reason = ""
        for index in range(len(self)):
            try:
                row = self._row(self._record(index))
            except BadSample as error:
                reason = reason or f"{self.path.name}:{self.number(index)}: {error}"
                continue
            if find_column(row, tuple(known)) is not None:
                return list(row)
            seen.update(dict.fromkeys(row))
        if not seen:
            raise DataError(f"{self.path.name}: no line holds a JSON object with keys ({reason or '{}'})")
        return list(seen)

    def _row(self, record: str) -> Row:
        try:
            row = parse_json(record)
        except Unreadable as error:
            raise BadSample(str(error)) from error
        if not isinstance(row, dict):
            raise BadSample(f"JSON {type(row).__name__} where an object should be")
        return row


class Delimited(Lines):
    """Rows of delimited fields, by commas with quotes as in CSV, or by another mark without; see ``open_table``."""

    def __init__(self, path: Path, delimiter: str = ",", headless: Headless | None = None) -> None:
        self._format: dict[str, Any] = {"delimiter": delimiter, "quoting": csv.QUOTE_NONE}
        if delimiter == ",":
            self._format["quoting"] = csv.QUOTE_MINIMAL
        super().__init__(path)
        try:
            first = self._fields(self._record(0))
        except BadSample as error:
            raise DataError(f"{path.name}:{self.number(0)}: {error}; the first row must be readable") from error
        named = headless(first) if headless is not None else None
        self._names = [name.strip() for name in (first if named is None else named)]
        if twice := next((name for name in self._names if name and self._names.count(name) > 1), None):
            raise DataError(f"{path.name}:{self.number(0)}: two columns are called '{twice}'; rename one")
        # What is behind the columns that a file without a header is known to have does not matter.
        self._exact = named is None
        if named is None:
            for places in (self._numbers, self._starts, self._ends):
                del places[0]
            if not self._numbers:
                raise DataError(f"{path.name} has a header and no rows; give a file with one sample a row")

    def names(self, known: Collection[str]) -> Sequence[str]:
        """The header, or what stands in for it."""
        return self._names

    def _index(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        end = line = 0

        def lines() -> Iterator[str]:
            nonlocal end, line
            for raw, length in _lines(file):
                end, line = end + length, line + 1
                # Bad bytes pass here, so that just their row is skipped when it is read.
                yield raw.decode("utf-8", "replace").removeprefix("\ufeff")

        records = csv.reader(lines(), **self._format)
        while True:
            number, start = line + 1, end
            try:
                fields = next(records)
            except StopIteration:
                return
            except csv.Error:  # reported when the row is read; the reader goes on with the next line
                yield number, start, end
                continue
            if any(field.strip() for field in fields):
                yield number, start, end

    def _fields(self, record: str) -> list[str]:
        try:
            # Strict, so that a quote that is never closed is an error and not one endless field.
            return next(csv.reader(io.StringIO(record, newline=""), strict=True, **self._format))
        except csv.Error as error:
            raise BadSample(f"not a valid CSV row: {error}") from error

    def _row(self, record: str) -> Row:
        fields = self._fields(record)
        # A comma in a text without quotes would move the fields behind it.
        beyond = self._exact and any(field.strip() for field in fields[len(self._names) :])
        if len(fields) < len(self._names) or beyond:
            expected = f"the header names {len(self._names)}" if self._exact else f"{len(self._names)} are expected"
            raise BadSample(f"{len(fields)} columns where {expected}")
        return dict(zip(self._names, fields, strict=False))


class ParquetTable(Table):
    """The rows of a parquet file. One cell is found by scanning its column in batches of 8 MB."""

    def __init__(self, path: Path) -> None:
        pa, pq = require("pyarrow", "datasets"), require("pyarrow.parquet", "datasets")
        super().__init__(path)
        try:
            with pq.ParquetFile(path) as file:
                self._names: list[str] = file.schema_arrow.names
                columns = map(file.schema.column, range(len(file.schema.names)))
                self._texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
                groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        except pa.ArrowException as error:
            raise DataError(f"{path} is not a readable parquet file: {error}") from error
        self._ends = list(itertools.accumulate(groups))
        if not len(self):
            raise DataError(f"{path} has no rows; give a file with one sample a row")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def number(self, index: int) -> int:
        """The place of a row, from 0."""
        return index

    def names(self, known: Collection[str]) -> Sequence[str]:
        """The columns of the schema."""
        return self._names

    def cell(self, index: int, column: str) -> Any:
        """One cell; see ``Table``."""
        group = bisect.bisect_right(self._ends, index)
        skip = index - (self._ends[group - 1] if group else 0)
        for batch in self._batches([group], [column]):
            if skip < batch.num_rows:
                return _value(batch.column(0)[skip])
            skip -= batch.num_rows
        raise BadSample(f"row {index} is no longer there")

    def _rows(self) -> Iterator[Row]:
        for batch in self._batches(None, None):
            for index in range(batch.num_rows):
                yield {name: _value(batch.column(i)[index]) for i, name in enumerate(self._names)}

    def _batches(self, groups: list[int] | None, columns: list[str] | None) -> Iterator[Any]:
        pa, pq = require("pyarrow", "datasets"), require("pyarrow.parquet", "datasets")
        try:
            # Without pre_buffer, which would hold the whole row group in memory; and texts stay as they are packed,
            # where a few kilobytes can stand for gigabytes of repeated cells.
            with pq.ParquetFile(self.path, pre_buffer=False, read_dictionary=self._texts) as file:
                sizes = [file.metadata.row_group(group) for group in groups or range(file.num_row_groups)]
                bytes_a_row = max(size.total_byte_size // max(1, size.num_rows) for size in sizes)
                rows = max(1, _BATCH_BYTES // max(1, bytes_a_row))
                yield from file.iter_batches(rows, row_groups=groups, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise BadSample(f"cannot read {self.path.name}: {error}") from error


def _value(scalar: Any) -> Any:
    """The Python value of an Arrow cell.

    Raises:
        BadSample: It is a string that is not UTF-8.
    """
    try:
        return scalar.as_py()
    except ValueError as error:
        raise BadSample(f"not a valid cell: {error}") from error
