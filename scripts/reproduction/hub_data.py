"""Data of the rows: read from the Hub once, through ``datasets``, and written in the layouts that ``latte eval`` reads.

Each writer takes rows as ``datasets`` gives them with images left undecoded (``{"bytes": …, "path": …}``), so that
files are the originals' bytes.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Rows = Iterable[dict[str, Any]]
SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"RIFF": ".webp"}


@dataclass(frozen=True)
class HubData:
    """A split on the Hub, and how it becomes a folder.

    Attributes:
        repo: Hub id of the dataset.
        split: Its split.
        write: Turns rows into files of a folder that exists.
        columns: What ``write`` calls a column, where the dataset calls it otherwise.
    """

    repo: str
    split: str
    write: Callable[[Rows, Path], None]
    columns: dict[str, str] = field(default_factory=dict)


def write_detection(rows: Rows, out: Path) -> None:
    """COCO's ``annotations/instances_val2017.json`` and ``val2017/``, of rows with all of COCO's fields."""
    (out / "val2017").mkdir()
    (out / "annotations").mkdir()
    images: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    categories: dict[int, str] = {}
    for row in rows:
        images.append({key: row[key] for key in ("file_name", "width", "height")} | {"id": row["image_id"]})
        (out / "val2017" / row["file_name"]).write_bytes(row["image"]["bytes"])
        names = row["annotations"]["category_name"]
        categories |= dict(zip(row["annotations"]["category_id"], names, strict=True))
        keys = ("category_id", "bbox", "area", "iscrowd")
        columns = zip(*(row["annotations"][key] for key in keys), strict=True)
        boxes += [{"image_id": row["image_id"], **dict(zip(keys, values, strict=True))} for values in columns]
    document = {
        "images": images,
        "annotations": [{"id": number, **box} for number, box in enumerate(boxes, start=1)],
        "categories": [{"id": key, "name": categories[key]} for key in sorted(categories)],
    }
    (out / "annotations" / "instances_val2017.json").write_text(json.dumps(document))


def write_captions(rows: Rows, out: Path) -> None:
    """COCO's ``captions.json`` and ``images/``, of rows with an image and its captions, one a line."""
    images: list[dict[str, Any]] = []
    captions: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        images.append({"id": number, "file_name": _save(row["image"], out / "images", f"{number:06d}")})
        captions += [{"image_id": number, "caption": text} for text in _lines(row["captions"])]
    document = {"images": images, "annotations": [{"id": i, **one} for i, one in enumerate(captions)]}
    (out / "captions.json").write_text(json.dumps(document))


def write_pairs(rows: Rows, out: Path) -> None:
    """SugarCrepe's JSON and ``images/``, of rows with an image, its caption and a negative."""
    entries = {}
    for number, row in enumerate(rows):
        image, right, wrong = (_first(row[key]) for key in ("image", "caption", "negative_caption"))
        name = _save(image, out / "images", f"{number:06d}")
        entries[str(number)] = {"filename": name, "caption": right, "negative_caption": wrong}
    (out / "sugarcrepe.json").write_text(json.dumps(entries))


def write_classes(rows: Rows, out: Path) -> None:
    """A folder a class, of rows with an image and the name of its class (``AnnualCrop`` becomes ``Annual_Crop``)."""
    for number, row in enumerate(rows):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", row["label"]).replace("/", "_")
        _save(row["image"], out / name, f"{number:06d}")


def write_texts(rows: Rows, out: Path) -> None:
    """``texts.csv`` with the columns text and label."""
    with (out / "texts.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], row["label"]] for row in rows)


DATA = {
    "coco": HubData("BrandonLSX/coco-2017", "validation", write_detection),
    "coco-captions": HubData(  # Karpathy's 5,000 test images
        "clip-benchmark/wds_mscoco_captions", "test", write_captions, {"image": "jpg", "captions": "txt"}
    ),
    "sugarcrepe": HubData("yjkimstats/SUGARCREPE_fmt", "train", write_pairs, {"image": "images"}),
    "cifar10": HubData("uoft-cs/cifar10", "test", write_classes, {"image": "img"}),
    "eurosat": HubData("timm/eurosat-rgb", "test", write_classes),
    "food101": HubData("ethz/food101", "validation", write_classes),
    "sst2": HubData("stanfordnlp/sst2", "validation", write_texts, {"text": "sentence"}),
}
CALIBRATION = {
    "coco-train": "hf:BrandonLSX/coco-2017:train",
    "sst2-train": "hf:stanfordnlp/sst2:train",
}


def place_of(name: str, root: Path) -> Path:
    """What ``--data`` takes for a dataset: the folder of that name under ``root``, filled from the Hub if absent."""
    folder = root / name
    if not folder.is_dir():
        write_folder(DATA[name], stream(DATA[name]), folder)
    return folder / "texts.csv" if (folder / "texts.csv").is_file() else folder


def calibration(name: str, root: Path) -> str:
    """Calibration samples: a folder or file under ``root`` where there is one, else rows of the Hub."""
    local = next((path for path in (root / name, root / f"{name}.txt") if path.exists()), None)
    return CALIBRATION[name] if local is None else str(local)


def write_folder(data: HubData, rows: Rows, folder: Path) -> None:
    """Write a dataset as a whole or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    data.write(rows, partial)
    partial.rename(folder)


def stream(data: HubData) -> Iterator[dict[str, Any]]:
    """Rows of a dataset of the Hub."""
    from datasets import load_dataset

    return rows_of(load_dataset(data.repo, split=data.split, streaming=True), data.columns)


def rows_of(dataset: Any, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Rows under our own names, images undecoded, class numbers as names."""
    from datasets import ClassLabel, Image

    features = dataset.features or {}
    for name, kind in features.items():
        if isinstance(kind, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
    names = {theirs: ours for ours, theirs in columns.items()}
    classes = {name: kind for name, kind in features.items() if isinstance(kind, ClassLabel)}
    for row in dataset:
        yield {names.get(k, k): classes[k].int2str(v) if k in classes else v for k, v in row.items()}


def _save(image: dict[str, Any], folder: Path, stem: str) -> str:
    """Write an image's own bytes; returns the name of the file."""
    content = image["bytes"] or Path(image["path"]).read_bytes()
    suffix = next((suffix for magic, suffix in SUFFIXES.items() if content.startswith(magic)), None)
    if suffix is None:
        raise SystemExit(f"{stem} for {folder} is neither JPEG nor PNG nor WebP: has the dataset changed?")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}{suffix}").write_bytes(content)
    return f"{stem}{suffix}"


def _lines(text: str | bytes) -> list[str]:
    decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    return [line.strip() for line in decoded.splitlines() if line.strip()]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
