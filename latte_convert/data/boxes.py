"""Boxes in COCO's layout, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte_convert.data.json_file import JsonFile, field
from latte_convert.errors import DataError, nearest

SLACK = 1.0
"""Pixels that a box may reach beyond its image: COCO's own, rounded to two digits, do by a little."""

_SYNONYMS = {"motorbike": "motorcycle", "aeroplane": "airplane", "sofa": "couch", "tvmonitor": "tv"}
_NUMBER = (int, float)


@dataclass(frozen=True)
class Instances:
    """Labelled boxes.

    Attributes:
        images: The entry of every image (``id``, ``file_name``, ``width``, ``height``), by id.
        annotations: Boxes of each image, as pycocotools reads them, by id of the image.
        categories: Name of every category, by id.
        where: ``FILE:LINE`` of every image.
    """

    images: dict[Any, dict[str, Any]]
    annotations: dict[Any, list[dict[str, Any]]]
    categories: dict[int, str]
    where: dict[Any, str]


def read_instances(path: Path) -> Instances:
    """Read COCO's ``instances_*.json``.

    Raises:
        DataError: It is damaged, a box is of no image or category or lies outside its image, or there is no box.
    """
    document = JsonFile(path)
    places = document.list_of("images")
    where = {field(entry, "id", (int, str), place): place for place, entry in places}
    images: dict[Any, dict[str, Any]] = {}
    for place, entry in places:
        if entry["id"] in images:
            raise DataError(f"{place}: image {entry['id']} is there twice.")
        field(entry, "file_name", str, place)
        for side in ("width", "height"):
            if field(entry, side, int, place) < 1:
                raise DataError(f"{place}: '{side}' is {entry[side]}.")
        images[entry["id"]] = entry
    if len({type(image) for image in images}) > 1:
        raise DataError(f"{path}: ids of images are numbers and texts: use one of the two.")
    categories: dict[int, str] = {}
    for place, entry in document.list_of("categories"):
        if field(entry, "id", int, place) in categories:
            raise DataError(f"{place}: category {entry['id']} is there twice.")
        categories[entry["id"]] = field(entry, "name", str, place)
    annotations: dict[Any, list[dict[str, Any]]] = {image: [] for image in images}
    for number, (place, entry) in enumerate(document.list_of("annotations"), start=1):
        box = _annotation(entry, images, categories, place)
        # Numbered anew: pycocotools takes a matched annotation of id 0 for no match.
        annotations[box["image_id"]].append({**box, "id": number})
    if not any(annotations.values()):
        raise DataError(f"{path}: no box in it.")
    return Instances(images, annotations, categories, where)


def _annotation(
    entry: dict[str, Any], images: dict[Any, dict[str, Any]], categories: dict[int, str], place: str
) -> dict[str, Any]:
    image, category = field(entry, "image_id", (int, str), place), field(entry, "category_id", int, place)
    if image not in images:
        raise DataError(f"{place}: a box of image {image}, which 'images' does not have.")
    if category not in categories:
        raise DataError(f"{place}: category {category} is not one of the {len(categories)} in 'categories'.")
    box = field(entry, "bbox", list, place)
    if len(box) != 4 or not all(map(_finite, box)):
        raise DataError(f"{place}: 'bbox' is {box}, not [x, y, width, height] in pixels.")
    x, y, width, height = box
    right, bottom = images[image]["width"], images[image]["height"]
    inside = x >= -SLACK and y >= -SLACK and x + width <= right + SLACK and y + height <= bottom + SLACK
    if width < 0 or height < 0 or not inside:
        raise DataError(
            f"{place}: the box {box} (x, y, width, height) lies outside its image of {right}x{bottom} pixels "
            f"({images[image]['file_name']})."
        )
    area, crowd = entry.get("area"), entry.get("iscrowd") or 0
    if crowd not in (0, 1):
        raise DataError(f"{place}: 'iscrowd' is {crowd!r}, not 0 or 1.")
    return {
        "image_id": image, "category_id": category, "bbox": box, "iscrowd": int(crowd), "ignore": int(crowd),
        "area": area if _finite(area) else width * height,
    }  # fmt: skip


def _finite(value: Any) -> bool:
    """Whether a member is a number that a float can hold."""
    try:
        return isinstance(value, _NUMBER) and math.isfinite(value)
    except OverflowError:
        return False


def categories_of(names: list[str], instances: Instances, where: str) -> dict[int, int]:
    """Category of every output of a detector that is one: by its name, or by its number where it has no names.

    Args:
        names: What the checkpoint calls its outputs, by index.
        instances: The labels.
        where: Of the labels, for the message.

    Raises:
        DataError: A category that has boxes is not one of the detector's.
    """
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        found = {i: i for i in range(len(names)) if i in instances.categories}
    else:
        spelt: dict[str, int] = {}
        for category, name in instances.categories.items():
            if spelt.setdefault(_plain(name), category) != category:
                raise DataError(
                    f"{where}: categories {spelt[_plain(name)]} and {category} have the same name, '{name}': the "
                    "detector's class of that name cannot be told apart. Merge or rename them."
                )
        found = {i: spelt[_plain(name)] for i, name in enumerate(names) if _plain(name) in spelt}
    used = {box["category_id"] for boxes in instances.annotations.values() for box in boxes}
    if unknown := sorted(used - set(found.values())):
        name = instances.categories[unknown[0]]
        raise DataError(
            f"{where}: {len(unknown)} categories with boxes are not among the detector's {len(names)} classes, such as "
            f"{unknown[0]} '{name}' ({nearest(name, names)})."
        )
    return found


def _plain(name: str) -> str:
    plain = "".join(name.casefold().replace("_", " ").split())
    return _SYNONYMS.get(plain, plain)
