"""Where labels are: a file and the folder of the images that it names, or a folder a class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from latte_convert.data.sources import missing_path
from latte_convert.errors import DataError, UsageError
from latte_convert.wording import some

_TEST_FOLDERS = ("test", "val", "validation")


def label_files(data: Sequence[str], patterns: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The label files, and the folders in which their images may lie.

    ``--data`` is the label file, or a folder with it (itself, or in ``annotations/``, as COCO has it); a second
    ``--data`` is the folder of the images, which are looked for beside the labels otherwise.

    Args:
        data: One place or two, as the user wrote them.
        patterns: What label files are called in a folder; those of the first pattern that any has are taken.

    Returns:
        Label files, sorted, at least one; and folders, the likeliest first.

    Raises:
        UsageError: More than two places.
        DataError: There is no such place, or no label file in it.
    """
    if len(data) > 2:
        raise UsageError("this task reads two --data at most: the labels, and the folder of the images.")
    places = [Path(place).expanduser() for place in data]
    absent = next((place for place in places if not place.exists()), None)
    if absent is not None:
        raise missing_path(str(absent))
    if len(places) == 2 and not places[1].is_dir():
        raise DataError(f"{places[1]} is no folder: the second --data is the folder of the images.")
    files = [places[0]] if places[0].is_file() else _found(places[0], patterns)
    if not files:
        raise DataError(f"{places[0]} has no labels: no {' or '.join(patterns)} in it. Give the label file itself.")
    return files, _with_subfolders(places[1] if len(places) == 2 else _base(files[0]))


def one(files: Sequence[Path]) -> Path:
    """The only file of a task that reads one.

    Raises:
        DataError: There are several.
    """
    if len(files) > 1:
        raise DataError(f"several label files ({some(files)}): give the one to read as --data.")
    return files[0]


def image_folder(folders: Sequence[Path], name: str, where: str) -> Path:
    """The first folder that has the image.

    Raises:
        DataError: None has.
    """
    # Path.is_file raises where a name is too long.
    found = next((folder for folder in folders if os.path.isfile(folder / name)), None)
    if found is None:
        raise DataError(
            f"{where}: there is no image '{name}' in {folders[0]} or the folders in it. Give the folder of the images "
            "as a second --data."
        )
    return found


def split_folder(root: Path) -> Path:
    """The folder with a folder a class: the test part of a place that has parts."""
    parts = [root / name for name in _TEST_FOLDERS if (root / name).is_dir()] if (root / "train").is_dir() else []
    return next(iter(parts), root)


def _found(folder: Path, patterns: Sequence[str]) -> list[Path]:
    matches = ([*folder.glob(p), *folder.glob(f"annotations/{p}")] for p in patterns)
    return sorted(path for path in next(filter(None, matches), []) if path.is_file())


def _base(file: Path) -> Path:
    return file.parent.parent if file.parent.name == "annotations" else file.parent


def _with_subfolders(folder: Path) -> list[Path]:
    inner = sorted(path for path in folder.glob("*") if path.is_dir())
    return [folder, *inner, *sorted(path for path in folder.glob("images/*") if path.is_dir())]
