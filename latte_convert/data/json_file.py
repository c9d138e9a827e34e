"""JSON labels that can say on which line an entry stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from latte_convert.errors import DataError
from latte_convert.reading import naming, parse_json, read_text

_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class JsonFile:
    """A JSON document whose entries are named by file, line and place.

    Args:
        path: The file.

    Raises:
        DataError: It cannot be read or parsed.
    """

    path: Path

    def __post_init__(self) -> None:
        _ = self.value

    @cached_property
    def _text(self) -> str:
        """The file, read once: it may change."""
        with naming(self.path, DataError):
            return read_text(self.path)

    @cached_property
    def value(self) -> Any:
        """The whole document."""
        with naming(self.path, DataError):
            return parse_json(self._text)

    def list_of(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """The objects under a top-level key, each with ``FILE:LINE (NAME[INDEX])``.

        Raises:
            DataError: There is no such list, or an entry is no object.
        """
        found = self.value.get(name) if isinstance(self.value, dict) else None
        if not isinstance(found, list):
            raise DataError(f"{self.path}: no list '{name}' in it.")
        places = (f"{self.path}:{line} ({name}[{i}])" for i, line in enumerate(self._lines(name)))
        return [(where, _object(entry, where)) for where, entry in zip(places, found, strict=True)]

    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        """The objects of a document that is one object or list of them, each with ``FILE:LINE (KEY)``.

        Raises:
            DataError: It is neither, or an entry is no object.
        """
        if not isinstance(self.value, dict | list):
            raise DataError(f"{self.path}: JSON {type(self.value).__name__} where entries should be.")
        keys, found = (
            zip(*self.value.items(), strict=True)
            if isinstance(self.value, dict) and self.value
            else (range(len(self.value)), self.value)
        )
        places = (f"{self.path}:{line} ({key})" for key, line in zip(keys, self._lines(), strict=True))
        return [(where, _object(entry, where)) for where, entry in zip(places, found, strict=True)]

    def _lines(self, name: str | None = None) -> list[int]:
        """Line of every member of the document, or of what a top-level key holds."""
        text = self._text
        at = _skip(text, 0)
        if name is not None:
            # The last one counts where a key is there twice, as in the parser.
            at = [place for key, place in _members(text, at) if key == name][-1]
        places: dict[str | int, int] = {}
        line, last = 1, 0
        for key, place in _members(text, at):
            line, last = line + text.count("\n", last, place), place
            places[key] = line
        return list(places.values())


def _object(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: JSON {type(entry).__name__} where an object should be.")
    return entry


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _members(text: str, at: int) -> Iterator[tuple[str | int, int]]:
    """Key or index, and offset, of every member of the object or list that begins at ``at``; valid JSON only."""
    decode = json.JSONDecoder(strict=False).raw_decode
    closing, index = ("}" if text[at] == "{" else "]"), 0
    at = _skip(text, at + 1)
    while text[at] != closing:
        key: str | int = index
        if closing == "}":
            key, at = decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        yield key, at
        _, at = decode(text, at)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1


def field(entry: dict[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """A member of an object, of the kind that it must be.

    Raises:
        DataError: It is missing, empty, or of another kind.
    """
    if name not in entry:
        raise DataError(f"{where}: no '{name}'; it has {', '.join(list(entry)[:10]) or 'nothing'}.")
    value = entry[name].strip() if isinstance(entry[name], str) else entry[name]
    if value is None or value == "":
        raise DataError(f"{where}: '{name}' is empty.")
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise DataError(f"{where}: '{name}' is {value!r}, not {wanted}.")
    return value
