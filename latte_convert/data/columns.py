"""Columns by the names that people give them, and what a cell stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from latte_convert.data.decode import MOST_BYTES, PLURAL, BadSample, Modality, clean_text
from latte_convert.errors import DataError
from latte_convert.reading import Unreadable, read_bytes
from latte_convert.wording import some

_COLUMNS: dict[Modality, str] = {
    "text": "text sentence s1 sentence1 caption transcript transcription content prompt",
    "image": "image img file_name path jpg jpeg png webp",
    "audio": "audio file_name path wav flac mp3 ogg",
}
COLUMNS = {modality: tuple(names.split()) for modality, names in _COLUMNS.items()}
"""Names under which a sample without labels is known, the likeliest first."""

_NAMED = 10


def find_column(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The first of ``known`` that is among ``names``, whatever its case, as it is spelt there."""
    spelt = {str(name).strip().lower(): name for name in reversed(list(names))}
    return next((spelt[name] for name in known if name in spelt), None)


def choose_column(names: Iterable[str], modality: Modality, where: str) -> str:
    """The column that samples without labels are read from.

    Raises:
        DataError: None of the names is one this modality is known by; it lists those found.
    """
    names, known = list(names), COLUMNS[modality]
    column = find_column(names, known)
    if column is None:
        raise DataError(
            f"{where}: no column or key to read {PLURAL[modality]} from; it has "
            f"{some(map(repr, names), _NAMED) or 'no names'}. Rename one to '{known[0]}' "
            f"(also known: {', '.join(known[1:])})"
        )
    return column


def cell(row: Mapping[str, Any], known: Sequence[str], where: str) -> Any:
    """The cell of the first of several column names that a row has.

    Raises:
        DataError: It has none of them, or that cell is empty.
    """
    column = find_column(row, known)
    if column is None:
        others = f" (also known: {', '.join(known[1:])})" if known[1:] else ""
        raise DataError(f"{where}: no column '{known[0]}'{others}; it has {some(row, _NAMED) or 'nothing'}.")
    value = row[column].strip() if isinstance(row[column], str) else row[column]
    if value is None or value == "":
        raise DataError(f"{where}: '{column}' is empty.")
    return value


def text_cell(row: Mapping[str, Any], known: Sequence[str], where: str) -> str:
    """A ``cell`` that must be a text.

    Raises:
        DataError: There is none, it is empty, or it is a number or a list.
    """
    value = cell(row, known, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: '{known[0]}' is {value!r}, not a text: write one text a row.")
    return value


def cell_content(value: object, modality: Modality, read_path: Callable[[str], bytes]) -> bytes | str:
    """What a cell stands for: text itself, or the bytes of a file held in it or named by it.

    Args:
        value: A string, bytes, or the ``{"bytes", "path"}`` of an undecoded ``datasets`` image or audio.
        modality: What the cell should hold.
        read_path: Reads the file that a cell names.

    Raises:
        BadSample: The cell is empty or of another type.
    """
    if modality == "text":
        if not isinstance(value, str):
            raise BadSample("no text in it" if value is None else f"{type(value).__name__} where text should be")
        return clean_text(value)
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value.strip():
        raise BadSample(f"{value!r} names no file")
    return read_path(value.strip())


def read_file(path: Path, modality: Modality) -> bytes:
    """The bytes of a file that holds one sample.

    Raises:
        BadSample: It cannot be read.
    """
    try:
        return read_bytes(path, MOST_BYTES[modality])
    except FileNotFoundError as error:
        raise BadSample(f"cannot read {path.name}: {error.strerror}") from error
    except Unreadable as error:
        raise BadSample(f"cannot read {path.name}: {error}") from error
