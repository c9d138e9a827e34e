"""Labelled samples on disk: an image or text and what is known about it; decoded later."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from latte_convert.data.columns import read_file
from latte_convert.data.decode import PLURAL, SUFFIXES, Modality, Value, decode
from latte_convert.data.sources import Folder, missing_path
from latte_convert.errors import DataError, nearest


@dataclass(frozen=True)
class Example:
    """One input of the model, and what is known about it.

    Attributes:
        id: Path relative to the data, or ``file.csv:LINE``: what a message calls it.
        modality: What ``load`` gives.
        load: Decodes it, each time anew; raises BadSample where it is damaged, and the example is skipped.
        target: What the task knows about it: a class index, a score, the transcript, ids of its captions.
    """

    id: str
    modality: Modality
    load: Callable[[], Value]
    target: Any = None


def file_loader(path: Path, modality: Modality, sampling_rate: int | None = None) -> Callable[[], Value]:
    """A ``load`` for an example that is a file."""
    return partial(_decode_file, path, modality, sampling_rate)


def _decode_file(path: Path, modality: Modality, sampling_rate: int | None) -> Value:
    return decode(read_file(path, modality), modality, sampling_rate)


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
    return f"'{name}' is not one of the {len(classes)} classes ({nearest(name, classes)})."


def named_file(folder: Path, name: Any, modality: Modality, where: str) -> Path:
    """The file that a row names, relative to ``folder``.

    Raises:
        DataError: The name is no text, or the file is not there or of another kind.
    """
    if not isinstance(name, str):
        raise DataError(f"{where}: {name!r} is not the name of a file.")
    path = folder / name
    if not os.path.isfile(path):  # Path.is_file raises where a name is too long
        raise DataError(f"{where}: {missing_path(str(path))}.")
    if path.suffix.lower() not in SUFFIXES[modality]:
        raise DataError(f"{where}: {name} is not one of {PLURAL[modality]} ({', '.join(sorted(SUFFIXES[modality]))}).")
    return path
