"""Rendered scenes with known boxes: coloured handwritten digits on textured canvases.

The digits are scikit-learn's 1797 images of 8x8 pixels. They are divided once into ``train`` and ``heldout``, so a
held-out scene shows digits no training scene has shown. A scene depends on ``(split, index, seed, size)`` alone.

    python scripts/scenes.py --out scenes/ --split heldout --count 128
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SPLITS = ("train", "heldout")
SIZE = 96  # pixels a side
COUNTS = (1, 5)  # digits in a scene, both ends included
HEIGHTS = (14, 32)  # pixels a digit is high with its empty rows, both ends included
COLOURS = {
    "red": (235, 45, 45),
    "orange": (250, 145, 30),
    "yellow": (245, 230, 60),
    "green": (45, 210, 70),
    "cyan": (60, 225, 235),
    "blue": (70, 95, 255),
    "magenta": (235, 70, 225),
    "white": (250, 250, 250),
}
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")
HELDOUT_DIGITS = 360  # of 1797
FAINTEST = 0.3  # ink below this share is not drawn at all, so that a box has a sharp edge


@dataclass(frozen=True)
class Scene:
    """One picture and what is in it, object by object in drawing order.

    Attributes:
        image: uint8 ``(size, size, 3)``, RGB.
        boxes: float32 ``(n, 4)``: x0, y0, x1, y1 in pixels, right and bottom exclusive; tight, never overlapping.
        labels: int64 ``(n,)``, the digits 0 to 9.
        colours: Keys of :data:`COLOURS`.
        places: ``"top left"`` to ``"bottom right"``: the ninth of the picture that holds the box's middle.
        digits: int64 ``(n,)``, which of scikit-learn's images each object shows.
    """

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    colours: tuple[str, ...]
    places: tuple[str, ...]
    digits: np.ndarray


@cache
def digit_indices(split: str) -> np.ndarray:
    """Indices into ``load_digits()`` that belong to ``split``; the two splits share none.

    Raises:
        ValueError: There is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"no split named {split!r}: choose one of {', '.join(SPLITS)}")
    # The source lists digits in writing order (0, 1, 2, ...): without a shuffle a split would miss some classes.
    order = np.random.default_rng(0).permutation(len(_digits()[1]))
    return np.sort(order[:HELDOUT_DIGITS] if split == "heldout" else order[HELDOUT_DIGITS:])


def canvas(split: str, index: int, seed: int = 0, size: int = SIZE) -> np.ndarray:
    """The textured ground of a scene before anything is drawn on it, uint8 ``(size, size, 3)``."""
    rng = _generator(split, index, seed, stream=0)
    ground = rng.uniform(40, 110) + rng.uniform(-25, 25, 3)
    kind = rng.integers(3)
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    angle = rng.uniform(0, 2 * np.pi)
    along = np.cos(angle) * axis[None, :] + np.sin(angle) * axis[:, None]
    if kind == 0:  # gradient
        texture = along
    elif kind == 1:  # stripes
        texture = np.sin(along * rng.uniform(6, 40) + rng.uniform(0, 2 * np.pi))
    else:  # blobs: coarse noise, enlarged
        cells = int(rng.integers(4, 13))
        texture = _enlarge(rng.uniform(-1, 1, (cells, cells)), size, size)
    tint = rng.uniform(8, 28) * rng.uniform(0.5, 1.0, 3)
    grain = rng.integers(0, 1 + int(rng.integers(1, 24)), (size, size, 1), dtype=np.uint8)
    picture = ground.astype(np.float32) + texture[..., None].astype(np.float32) * tint.astype(np.float32) + grain
    return np.clip(picture, 0, 190).astype(np.uint8)


def render(split: str, index: int, seed: int = 0, size: int = SIZE) -> Scene:
    """Draw one scene; the same arguments always give the same pixels.

    Args:
        split: ``"train"`` or ``"heldout"``: whose digits are shown.
        index: Number of the scene, from 0.
        seed: Another seed gives another endless series of scenes.
        size: Pixels a side, at least 48.

    Raises:
        ValueError: There is no such split.
    """
    pool = digit_indices(split)
    rng = _generator(split, index, seed, stream=1)
    image = canvas(split, index, seed, size)
    boxes: list[tuple[int, int, int, int]] = []
    digits: list[int] = []
    colours: list[str] = []
    for _ in range(rng.integers(COUNTS[0], COUNTS[1] + 1)):
        digit = int(rng.choice(pool))
        ink = _ink(digit, int(rng.integers(HEIGHTS[0], HEIGHTS[1] + 1)), rng.uniform(0.85, 1.2))
        colour = str(rng.choice(list(COLOURS)))
        box = _free_place(rng, ink.shape, boxes, size)
        if box is None:
            continue  # no room left: the scene has one object fewer
        x0, y0, x1, y1 = box
        patch = image[y0:y1, x0:x1]
        image[y0:y1, x0:x1] = np.rint(patch + ink[..., None] * (np.array(COLOURS[colour]) - patch))
        boxes.append(box)
        digits.append(digit)
        colours.append(colour)
    edges = np.array(boxes, dtype=np.float32)
    shown = np.array(digits, dtype=np.int64)
    return Scene(image, edges, _digits()[1][shown], tuple(colours), _places(edges, size), shown)


def instances(scenes: Sequence[Scene]) -> dict[str, list[dict[str, object]]]:
    """The truth about ``scenes`` in COCO's format: ``images``, ``annotations`` and ``categories``.

    An image's id is its place in ``scenes``; a category's id is the digit itself.
    """
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for image_id, scene in enumerate(scenes):
        height, width, _ = scene.image.shape
        images.append({"id": image_id, "file_name": f"{image_id:06d}.png", "width": width, "height": height})
        for (x0, y0, x1, y1), label in zip(scene.boxes.tolist(), scene.labels.tolist(), strict=True):
            box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, "category_id": label, **box})
    categories: list[dict[str, object]] = [{"id": digit, "name": str(digit)} for digit in range(10)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_scenes(out: Path, split: str, count: int, seed: int = 0, size: int = SIZE) -> Path:
    """Write scenes 0 to ``count - 1`` as ``out/images/*.png`` and ``out/instances.json`` in COCO's format.

    Returns the path of the JSON file.
    """
    (out / "images").mkdir(parents=True, exist_ok=True)
    scenes = [render(split, index, seed, size) for index in range(count)]
    truth = instances(scenes)
    for scene, image in zip(scenes, truth["images"], strict=True):
        Image.fromarray(scene.image).save(out / "images" / str(image["file_name"]))
    path = out / "instances.json"
    path.write_text(json.dumps(truth))
    return path


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images as float32 shares of ink ``(1797, 8, 8)``, and labels int64 ``(1797,)``."""
    data = load_digits()
    return (data.images / 16).astype(np.float32), data.target.astype(np.int64)


def _generator(split: str, index: int, seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, SPLITS.index(split), index, stream])


@cache
def _weights(source: int, target: int) -> np.ndarray:
    """Linear interpolation along one axis as a matrix ``(target, source)``, pixel centres aligned."""
    at = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(source)[None, :])).astype(np.float32)


def _enlarge(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return _weights(image.shape[0], height) @ image @ _weights(image.shape[1], width).T


def _ink(digit: int, height: int, stretch: float) -> np.ndarray:
    """Share of ink per pixel, cropped so that every side of the array has some."""
    source = _digits()[0][digit]
    width = max(8, round(height * stretch * 0.8))
    ink = np.clip(1.35 * _enlarge(source, height, width), 0, 1)
    ink[ink < FAINTEST] = 0
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _free_place(
    rng: np.random.Generator, shape: tuple[int, ...], taken: list[tuple[int, int, int, int]], size: int
) -> tuple[int, int, int, int] | None:
    """A random place where the object overlaps none that is there, or None after 20 attempts."""
    height, width = shape
    for _ in range(20):
        x0, y0 = int(rng.integers(0, size - width + 1)), int(rng.integers(0, size - height + 1))
        x1, y1 = x0 + width, y0 + height
        if all(x1 <= a or c <= x0 or y1 <= b or d <= y0 for a, b, c, d in taken):
            return x0, y0, x1, y1
    return None


def _places(boxes: np.ndarray, size: int) -> tuple[str, ...]:
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    ninths = np.minimum(middles * 3 // size, 2).astype(int)
    return tuple(f"{ROWS[row]} {COLUMNS[column]}" for column, row in ninths.tolist())


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for images/ and instances.json")
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    print(write_scenes(arguments.out, arguments.split, arguments.count, arguments.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
