"""What is done piece by piece, and kept in a directory, so that a run that was ended is taken up where it was.

A piece is the fit of one site, or what one input shows. Its file is named by a digest of all that it depends on: the
checkpoint, the libraries, the samples, the settings and, for what follows fits, the fitted tensors. So what belongs to
anything else is not found, and what was written half is not there. A file that is not what was written is done anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from latte_convert import processes
from latte_convert.errors import OutputError
from latte_convert.reading import read_json

logger = logging.getLogger("latte_convert")

RECORD = "work.json"
"""File that marks a directory as one of ours, and says of which run it was last."""

T = TypeVar("T")
Classes = Sequence[type]
"""The dataclasses that a piece may hold."""


class Work:
    """Does pieces, each once; processes that have joined share them out, and all of them get all.

    Attributes:
        store: Where they are kept; None keeps none.
        about: What every piece depends on.
        found: Number of pieces that were there, by kind.
        done: Number of those that were not.
    """

    def __init__(self, store: Store | None = None, about: Mapping[str, Any] | None = None) -> None:
        self.store, self.about = store, dict(about or {})
        self.found: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    def each(
        self,
        kind: str,
        count: int,
        make: Callable[[Sequence[int]], Iterator[T]],
        key: Callable[[int], Any],
        classes: Classes = (),
    ) -> list[T]:
        """The pieces of one kind, in order: those that are kept, and the others, which are made.

        Args:
            kind: What they are; the name of their folder.
            count: How many there are.
            make: Told which are wanted, by number; yields each of them in that order. A piece is data: numbers, words,
                tensors and ``classes`` in lists, tuples, sets and dictionaries.
            key: All that a piece depends on, by number.
            classes: The dataclasses in it.

        Raises:
            OutputError: A piece cannot be written.
        """
        names = [digest([self.about, kind, key(index)]) for index in range(count)] if self.store else []
        mine = range(processes.rank(), count, processes.size())
        pieces: dict[int, T] = {}
        for index in mine if self.store else ():
            if self.store and (kept := self.store.get(kind, names[index], classes)) is not None:
                pieces[index] = kept
        missing = [index for index in mine if index not in pieces]
        if missing:
            with closing(_Made(make(missing))) as made:
                for index, piece in zip(missing, made, strict=True):
                    if self.store:
                        self.store.put(kind, names[index], piece)
                    pieces[index] = piece
        self.found[kind] += len(mine) - len(missing)
        self.done[kind] += len(missing)
        for others in processes.exchange(pieces, f"{count} {kind}"):
            pieces |= others
        return [pieces[index] for index in range(count)]

    def once(self, kind: str, key: Any, make: Callable[[], T], classes: Classes = ()) -> T:
        """One piece; see ``each``."""
        return self.each(kind, 1, lambda _: iter([make()]), lambda _: key, classes)[0]


class _Made(Iterator[T]):
    """An iterator that can be closed, whether or not it is a generator."""

    def __init__(self, pieces: Iterator[T]) -> None:
        self._pieces = pieces

    def __next__(self) -> T:
        return next(self._pieces)

    def close(self) -> None:
        getattr(self._pieces, "close", lambda: None)()


class Store:
    """A directory of pieces, each a safetensors file that appears whole or not at all. Several runs may share it.

    Args:
        directory: The directory; it is made where it is not there.

    Raises:
        OutputError: It is something else, holds files of others, or cannot be written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory).expanduser()
        advice = "Choose another --work, a new or an empty directory."
        try:
            if os.path.lexists(self.path) and not self.path.is_dir():
                raise OutputError(f"{self.path} is not a directory, so no work can be kept in it. {advice}")
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            there = sorted(path.name for path in self.path.iterdir() if not path.name.startswith("."))
            if there and RECORD not in there:
                raise OutputError(f"{self.path} holds other files ({there[0]}), and no work of latte. {advice}")
            self._last = self._recorded() if there else {}
            self._sweep()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"no work can be kept in {self.path}: {reason}. {advice}") from None

    def _recorded(self) -> dict[str, Any]:
        """The run that the directory was last used by."""
        advice = "It was not written by latte, or was damaged: remove it, and the pieces beside it are found again."
        content = read_json(self.path / RECORD, OutputError, advice=advice)
        if not isinstance(content, dict) or content.get("work_of") != "latte" or not isinstance(content["run"], dict):
            raise OutputError(f"{self.path / RECORD} is no record of work. {advice}")
        return dict(content["run"])

    def _sweep(self) -> None:
        """Remove what killed runs were writing, unless a run is at work here; our lock dies with this process."""
        with suppress(ImportError, OSError):  # not a POSIX system; a disk without locks
            import fcntl

            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            weakref.finalize(self, os.close, lock)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in (*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp")):
                    left.unlink()
            fcntl.flock(lock, fcntl.LOCK_SH)

    def begin(self, run: Mapping[str, Any]) -> None:
        """Say which run this is: what it has in common with the last one is reused, and what differs is named.

        Raises:
            OutputError: The record cannot be written.
        """
        run = json.loads(json.dumps(run))
        other = [name for name in run if self._last and self._last.get(name) != run[name]]
        if other:
            logger.warning(
                "%s holds work of another run: %s. What depends on that is done anew; the old work stays for its run",
                self.path,
                ", ".join(f"another {name}" for name in other),
            )
        self._write(self.path / RECORD, json.dumps({"work_of": "latte", "run": run}, indent=2).encode())

    def get(self, kind: str, name: str, classes: Classes) -> Any:
        """A piece, or None where it is not there, or is not what was written; then that is said."""
        path = self._place(kind, name)
        if not path.exists():
            return None
        try:
            from safetensors import safe_open

            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 (it is no dict)
                metadata = file.metadata() or {}
            document = json.loads(metadata["piece"])
            if metadata["sha256"] != _sum(name, document, tensors):
                raise ValueError("its content is another than was written")
            return _decode(document, tensors, {each.__name__: each for each in classes})
        except Exception as error:  # whatever damage a library runs into
            logger.warning("%s is damaged (%s): it is done anew", path, str(error).partition("\n")[0])
            return None

    def put(self, kind: str, name: str, piece: object) -> None:
        """Keep a piece.

        Raises:
            OutputError: It cannot be written.
        """
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        document = _encode(piece, tensors)
        metadata = {"piece": json.dumps(document), "sha256": _sum(name, document, tensors)}
        self._write(self._place(kind, name), save(tensors, metadata))

    def _place(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{name}.safetensors"

    def _write(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(
                f"{path} was not written: {error.strerror or error}. What was kept before is still there: make room, "
                "or choose another --work."
            ) from error


def digest(value: object) -> str:
    """Hex SHA-256 of data as pieces hold it."""
    tensors: dict[str, Tensor] = {}
    return _sum("", _encode(value, tensors), tensors)


def _sum(name: str, document: object, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(json.dumps([name, document], sort_keys=True).encode())
    for key, tensor in sorted(tensors.items()):
        total.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Data as JSON; its tensors go into ``tensors``. Python writes floats so that they read back to the bit."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if is_dataclass(value):
        content = {each.name: _encode(getattr(value, each.name), tensors) for each in fields(value)}
        return {"class": type(value).__name__, "fields": content}
    if isinstance(value, Mapping):
        return {"items": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": [_encode(item, tensors) for item in sorted(value)]}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    raise TypeError(f"{type(value).__name__} is no data that a piece can hold")


def _decode(document: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Any:
    """What was encoded.

    Raises:
        KeyError: It holds another class than those.
    """

    def back(item: Any) -> Any:
        return _decode(item, tensors, classes)

    if isinstance(document, list):
        return [back(item) for item in document]
    if not isinstance(document, dict):
        return document
    if "class" in document:
        return classes[document["class"]](**{name: back(item) for name, item in document["fields"].items()})
    ((kind, content),) = document.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {back(key): back(item) for key, item in content}
    return {"set": set, "tuple": tuple}[kind](back(item) for item in content)
