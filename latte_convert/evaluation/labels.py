"""Labelled data on disk: folders of classes, tables of rows, files that rows name; decoded later."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from latte_convert.data.decode import PLURAL, SUFFIXES, Modality, Value, decode
from latte_convert.data.sources import Folder
from latte_convert.data.tables import read_file
from latte_convert.errors import DataError, InputError
from latte_convert.evaluation.tasks.base import Example

T = TypeVar("T")


def choose(items: Sequence[T], samples: int | None, seed: int, name: Callable[[T], str]) -> list[T]:
    """At most ``samples`` items, in their own order; which ones depends on the seed and their names alone."""
    if samples is None or samples >= len(items):
        return list(items)
    ranked = sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{seed}\0{name(items[i])}".encode()).digest())
    return [items[i] for i in sorted(ranked[:samples])]


def file_loader(path: Path, modality: Modality, sampling_rate: int | None = None) -> Callable[[], Value]:
    """A ``load`` for an example that is a file."""
    return partial(_decode_file, path, modality, sampling_rate)


def _decode_file(path: Path, modality: Modality, sampling_rate: int | None) -> Value:
    return decode(read_file(path), modality, sampling_rate)


def text_loader(text: str) -> Callable[[], Value]:
    """A ``load`` for an example that is a text."""
    return lambda: text


def class_folder(root: Path, classes: Sequence[str] | None = None) -> tuple[list[Example], list[str]]:
    """Images in one folder a class, ``root/CLASS/…/image.jpg``; the target is the index of the class.

    Args:
        root: Holds a folder for each class.
        classes: The classes there are, where another split has said so; None for those found.

    Returns:
        Examples sorted by path relative to ``root``, and the classes, sorted where they were found.

    Raises:
        DataError: There is no image, one lies outside every class folder, or in one of an unknown class.
    """
    folder = Folder(root, "image")
    names = [folder.id(i) for i in range(len(folder))]
    loose = next((name for name in names if "/" not in name), None)
    if loose is not None:
        raise DataError(f"{root / loose} has no label: put each image into the folder of its class.")
    found = list(classes) if classes is not None else sorted({name.split("/")[0] for name in names})
    known = {name: i for i, name in enumerate(found)}
    strange = next((name for name in names if name.split("/")[0] not in known), None)
    if strange is not None:
        raise DataError(f"{root / strange}: {unknown_class(strange.split('/')[0], found)}")
    return [Example(n, "image", file_loader(root / n, "image"), known[n.split("/")[0]]) for n in names], found


def unknown_class(name: str, classes: Sequence[str]) -> str:
    """The sentence about a label that is no class."""
    from latte_convert.errors import nearest

    return f"'{name}' is none of the {len(classes)} classes ({nearest(name, classes)})."


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a ``.csv``, ``.tsv``, ``.jsonl`` or ``.parquet`` file with named columns.

    Yields:
        ``FILE:LINE`` (the first line of the row, from 1; the row of a parquet file), and the row.

    Raises:
        DataError: The file is of another kind or damaged; names the line.
    """
    readers = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: rows are read from {', '.join(readers)} files, not from '{path.suffix}'.")
    try:
        for number, row in reader(path):
            yield f"{path}:{number}", row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def csv_records(path: Path, delimiter: str = ",", *, quoted: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every record of a delimited file that is not blank."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(
            file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE, strict=quoted
        )
        number = 1
        for fields in reader:
            if any(field.strip() for field in fields):
                yield number, fields
            number = reader.line_num + 1


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    tabs = path.suffix.lower() == ".tsv"
    records = csv_records(path, "\t" if tabs else ",", quoted=not tabs)
    header = [name.strip() for name in next(records, (0, []))[1]]
    for number, fields in records:
        if len(fields) < len(header):
            raise DataError(f"{path}:{number}: {len(fields)} columns, the header names {len(header)}.")
        yield number, dict(zip(header, fields, strict=False))


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not valid JSON: {error}.") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: JSON {type(row).__name__} where an object should be.")
            yield number, row


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}.") from error


def cell(row: Mapping[str, Any], names: Iterable[str], where: str) -> Any:
    """The cell of the first of several column names that a row has, whatever its case.

    Raises:
        DataError: It has none of them, or that cell is empty.
    """
    names = tuple(names)
    spelt = {str(name).strip().lower(): name for name in row}
    found = next((spelt[name] for name in names if name in spelt), None)
    if found is None:
        there = ", ".join(map(str, list(row)[:10])) or "nothing"
        raise DataError(f"{where}: no column '{names[0]}' (also known: {', '.join(names[1:])}); it has {there}.")
    value = row[found]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{where}: '{found}' is empty.")
    return value.strip() if isinstance(value, str) else value


def text_cell(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """A ``cell`` that must be a text.

    Raises:
        DataError: There is none, it is empty, or it is a number or a list.
    """
    value = cell(row, names, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: '{names[0]}' is {value!r}, not a text: write one text a row.")
    return value


def named_file(folder: Path, name: Any, modality: Modality, where: str) -> Path:
    """The file that a row names, relative to ``folder``.

    Raises:
        DataError: The name is no text, or the file is not there or of another kind.
    """
    from latte_convert.data.sources import missing_path

    if not isinstance(name, str):
        raise DataError(f"{where}: {name!r} is not the name of a file.")
    path = folder / name
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long
        raise DataError(f"{where}: {missing_path(str(path))}.")
    if path.suffix.lower() not in SUFFIXES[modality]:
        raise DataError(f"{where}: {name} is not one of {PLURAL[modality]} ({', '.join(sorted(SUFFIXES[modality]))}).")
    return path


def need(module: str) -> Any:
    """Import a library of the ``eval`` extra.

    Raises:
        InputError: It is not installed; says how to get it.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f'this task needs {module.partition(".")[0]}, which is not installed: pip install "latte-convert[eval]".'
        ) from None
