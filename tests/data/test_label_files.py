"""Where the labels of a task and the images that they name are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from latte_convert.data.label_files import image_folder, label_files, one, split_folder
from latte_convert.errors import DataError, UsageError

PATTERNS = ("instances*.json", "*.json")


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """COCO's folders: labels in ``annotations``, images in ``val2017``."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val.json").touch()
    (tmp_path / "annotations" / "captions_val.json").touch()
    (tmp_path / "val2017").mkdir()
    (tmp_path / "val2017" / "a.jpg").touch()
    return tmp_path


def test_a_folder_has_its_labels_in_annotations_and_images_beside_them(coco: Path) -> None:
    files, folders = label_files([str(coco)], PATTERNS)
    assert files == [coco / "annotations" / "instances_val.json"], "the first pattern that any file has"
    assert folders == [coco, coco / "annotations", coco / "val2017"]
    assert image_folder(folders, "a.jpg", "f:1") == coco / "val2017"


def test_a_label_file_has_its_images_beside_it(coco: Path) -> None:
    captions = coco / "annotations" / "captions_val.json"
    assert label_files([str(captions)], PATTERNS) == ([captions], label_files([str(coco)], PATTERNS)[1])


def test_a_second_place_is_the_folder_of_the_images(coco: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "images" / "part").mkdir(parents=True)
    assert label_files([str(coco), str(elsewhere)], PATTERNS) == (
        [coco / "annotations" / "instances_val.json"],
        [elsewhere, elsewhere / "images", elsewhere / "images" / "part"],
    )


def test_places_that_do_not_fit_are_named(coco: Path) -> None:
    labels, images = coco / "annotations" / "captions_val.json", coco / "val2017"
    with pytest.raises(UsageError, match="two --data at most"):
        label_files([str(coco)] * 3, PATTERNS)
    with pytest.raises(DataError, match=r"no such file or folder: .*absent"):
        label_files([str(coco / "absent")], PATTERNS)
    with pytest.raises(DataError, match=r"captions_val\.json is no folder: the second --data"):
        label_files([str(coco), str(labels)], PATTERNS)
    with pytest.raises(DataError, match=r"val2017 has no labels: no instances\*\.json or \*\.json in it"):
        label_files([str(images)], PATTERNS)
    with pytest.raises(DataError, match=r"f:1: there is no image 'b\.jpg' in .*val2017"):
        image_folder([images], "b.jpg", "f:1")
    assert one([labels]) == labels
    with pytest.raises(DataError, match=r"several label files \(.*captions_val\.json.*\): give the one to read"):
        one([labels, coco / "annotations" / "instances_val.json"])


def test_classes_are_those_of_the_test_part_where_there_are_parts(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    assert split_folder(tmp_path) == tmp_path, "without a training part `val` is a class"
    (tmp_path / "train").mkdir()
    assert split_folder(tmp_path) == tmp_path / "val"
    (tmp_path / "test").mkdir()
    assert split_folder(tmp_path) == tmp_path / "test"
