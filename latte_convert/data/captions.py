"""Captioned images in the layouts of COCO, Flickr30k and Karpathy's splits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte_convert.data.columns import find_column, text_cell
from latte_convert.data.json_file import JsonFile, field
from latte_convert.data.tables import open_table
from latte_convert.errors import DataError

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
    else:
        found = _rows(path)
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


def _rows(path: Path) -> Iterator[Caption]:
    for where, row in open_table(path, headless=_headless, marks="|\t").rows():
        image = _NUMBERED.sub("", text_cell(row, _IMAGE, where))
        yield Caption(where, image, text_cell(row, _CAPTION, where))


def _headless(first: list[str]) -> list[str] | None:
    """Without a header the image comes first and its caption last."""
    if find_column(first, _IMAGE) is not None and find_column(first, _CAPTION) is not None:
        return None
    return [_IMAGE[0], *map(str, range(len(first) - 2)), _CAPTION[0]]
