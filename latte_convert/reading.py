"""Read a file whole, and JSON and YAML as their standards have them: the one way for all that the tool reads so."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml

from latte_convert.errors import DataError, InputError, IntegrityError, LatteError

MOST_BYTES = 1 << 30
"""Of one file that is read whole: COCO's largest labels take half of it."""


class Unreadable(ValueError):
    """Why a file or a document cannot be read; the message is a clause.

    Attributes:
        line: Where in the document, from 1; None where that is not known.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


def check_file(path: Path, most: int | None = None) -> int:
    """Size of a regular file, in bytes. A device or a pipe would block, or never end.

    Raises:
        FileNotFoundError: There is no such file.
        Unreadable: It is no regular file, or is larger than ``most`` bytes.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Unreadable(str(getattr(error, "strerror", None) or error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable("it is a folder" if stat.S_ISDIR(status.st_mode) else "it is a device or a pipe")
    if most is not None and status.st_size > most:
        raise Unreadable(f"it has {status.st_size / 1e6:,.0f} MB, and at most {most / 1e6:,.0f} MB are read")
    return status.st_size


def is_utf8(path: str | Path) -> bool:
    """Whether a name can stand in a JSON file, and be read by libraries that take UTF-8 alone, as safetensors does."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises:
        FileNotFoundError: There is no such file.
        Unreadable: It is no regular file, is larger than ``most`` bytes, or cannot be read.
    """
    try:
        # What the kernel makes up as it is read, under /proc, has no size and may block.
        return path.read_bytes() if check_file(path, most) else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(str(error.strerror or error)) from error


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a regular file of UTF-8, with or without a byte-order mark.

    Raises:
        FileNotFoundError: There is no such file.
        Unreadable: It is no regular file, is larger than ``most`` bytes, is not UTF-8, or cannot be read.
    """
    return _decode(read_bytes(path, most))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"not UTF-8: byte 0x{raw[error.start]:02x}", line) from error


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file of any size, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def parse_json(raw: bytes | str, *, lenient: bool = False) -> Any:
    """One JSON document, strictly: UTF-8, no NaN, no infinity, no key twice, since an entry would be lost silently.

    Args:
        raw: The document; a byte-order mark is passed over.
        lenient: Take NaN, infinities and repeated keys as ``json.loads`` does: in files that other tools read, too.

    Raises:
        Unreadable: It is no such document.
    """
    try:
        text = _decode(raw) if isinstance(raw, bytes) else raw.removeprefix("\ufeff")
        return json.loads(text) if lenient else json.loads(text, parse_constant=_not_json, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg}", error.lineno) from error
    except RecursionError as error:
        raise Unreadable("not usable JSON: nested too deeply") from error
    except Unreadable:
        raise
    except ValueError as error:  # Python's limit on the digits of an integer
        raise Unreadable("not usable JSON: a number of thousands of digits") from error


def _not_json(name: str) -> NoReturn:
    raise Unreadable(f"not valid JSON: {name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Unreadable(f"the key '{key}' is there twice in one object")
        found[key] = value
    return found


def read_json(
    path: Path,
    kind: type[InputError | IntegrityError] = DataError,
    *,
    absent: str = "",
    advice: str = "",
    lenient: bool = False,
) -> Any:
    """The document in a JSON file; see ``parse_json``.

    Args:
        path: The file.
        kind: Of the error where it cannot be read.
        absent: The sentence where there is no such file.
        advice: What to do about a file that cannot be read: a sentence.
        lenient: See ``parse_json``.

    Raises:
        LatteError: Of ``kind``; it names the file, and the line where that is known.
    """
    with naming(path, kind, absent=absent, advice=advice):
        return parse_json(read_bytes(path), lenient=lenient)


@contextmanager
def naming(path: Path, kind: type[LatteError], *, absent: str = "", advice: str = "") -> Iterator[None]:
    """What goes wrong with a file, as a sentence that names it; see ``read_json``."""
    try:
        yield
    except FileNotFoundError:
        raise kind(absent or f"there is no file {path}.") from None
    except Unreadable as error:
        place = f"{path}:{error.line}" if error.line else f"{path}"
        raise kind(f"{place}: {error}. {advice}".rstrip()) from None


class _Loader(yaml.SafeLoader):
    """Reads what ``safe_load`` does, but refuses a key that is given twice, as YAML asks: there the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; see PyYAML."""
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"'{key.value}' is given on line {lines[key.value]} and again on line {line}. Keep one of them."
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """One YAML document.

    Raises:
        Unreadable: It is not valid, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (it is a SafeLoader)
    except RecursionError as error:
        raise Unreadable("not usable YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a huge number, or no such date
        raise Unreadable(f"not valid YAML: {' '.join(str(error).split())}") from error
