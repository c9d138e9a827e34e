"""Captioned images in the layouts of COCO, Flickr30k and Karpathy's splits."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte_convert.data.json_file import JsonFile, field
from latte_convert.errors import DataError
from latte_convert.evaluation import labels

PATTERNS = ("captions*.json", "dataset*.json", "captions.*", "results*.csv", "results*.token", "metadata.*")
"""What caption files are called in a folder."""

_IMAGE = ("image", "image_name", "file_name", "filename", "image_path")
_CAPTION = ("caption", "comment", "text", "sentence")
_NUMBERED = re.compile(r"#\d+$")  # Flickr's 1000092795.jpg#0


@dataclass(frozen=True)
class Caption:
    """A caption: where it stands, ``FILE:LINE``, the name of its image, and its text."""

    where: str
    image: str
    text: str


def read_captions(path: Path, split: str = "test") -> list[Caption]:
    """All captions of a file.

    Args:
        path: COCO's ``captions_*.json``; Karpathy's ``dataset_*.json``; or a table of an image and a caption a row:
            ``.jsonl``, ``.parquet``, or text delimited by ``|``, a tab or a comma, with a header or without.
        split: Which part of Karpathy's splits.

    Raises:
        DataError: The file is damaged or of another layout, a caption is empty or of no image, or an image has none;
            names file and line.
    """
    if path.suffix.lower() == ".json":
        document = JsonFile(path)
        images = document.list_of("images")
        found = _karpathy(images, split) if any("sentences" in e for _, e in images) else _coco(document, images)
    elif path.suffix.lower() in (".jsonl", ".parquet"):
        found = (
            Caption(where, labels.text_cell(row, _IMAGE, where), labels.text_cell(row, _CAPTION, where))
            for where, row in labels.rows(path)
        )
    else:
        found = _delimited(path)
    captions = list(found)
    if not captions:
        raise DataError(f"{path}: no caption in it.")
    return captions


def _coco(document: JsonFile, images: list[tuple[str, dict[str, object]]]) -> Iterator[Caption]:
    names: dict[Any, str] = {}
    for where, entry in images:
        if field(entry, "id", (int, str), where) in names:
            raise DataError(f"{where}: image {entry['id']} is there twice.")
        names[entry["id"]] = field(entry, "file_name", str, where)
    captioned = set()
    for where, entry in document.list_of("annotations"):
        image = field(entry, "image_id", (int, str), where)
        if image not in names:
            raise DataError(f"{where}: a caption of image {image}, which 'images' does not have.")
        captioned.add(image)
        yield Caption(where, names[image], field(entry, "caption", str, where))
    bare = next((where for where, entry in images if entry["id"] not in captioned), None)
    if bare is not None:
        raise DataError(f"{bare}: this image has no caption. Add one, or remove the image.")


def _karpathy(images: list[tuple[str, dict[str, object]]], split: str) -> Iterator[Caption]:
    for where, entry in images:
        if entry.get("split", split) != split:
            continue
        name = "/".join(filter(None, (str(entry.get("filepath") or ""), field(entry, "filename", str, where))))
        for sentence in field(entry, "sentences", list, where) or [{}]:
            if not isinstance(sentence, dict):
                raise DataError(f"{where}: 'sentences' has {sentence!r} where an object with 'raw' should be.")
            yield Caption(where, name, field(sentence, "raw", str, where))


def _delimited(path: Path) -> Iterator[Caption]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = file.readline()
        delimiter = next((mark for mark in ("|", "\t") if mark in first), ",")
        records = labels.csv_records(path, delimiter, quoted=delimiter == ",")
        image, caption, number = 0, -1, 0
        for number, fields in records:
            where = f"{path}:{number}"
            names = [name.strip().lower() for name in fields]
            if number == 1 and (header := _header(names)):
                image, caption = header
                continue
            if len(fields) < 2 or caption >= len(fields):
                raise DataError(f"{where}: {len(fields)} column where an image and a caption are expected.")
            name, text = _NUMBERED.sub("", fields[image].strip()), fields[caption].strip()
            if not name or not text:
                raise DataError(f"{where}: no {'caption' if name else 'image'} in this row.")
            yield Caption(where, name, text)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _header(names: list[str]) -> tuple[int, int] | None:
    """Columns of image and caption, where these are their names."""
    image = next((names.index(name) for name in _IMAGE if name in names), None)
    caption = next((names.index(name) for name in _CAPTION if name in names), None)
    return None if image is None or caption is None else (image, caption)
