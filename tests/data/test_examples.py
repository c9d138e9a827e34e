from __future__ import annotations

import pytest
from PIL import Image

from latte_convert.data.examples import class_folder, named_file
from latte_convert.errors import DataError


def image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(path)


def test_a_folder_a_class(tmp_path):
    for name in ("b/2.png", "a/1.png", "a/deep/3.png"):
        image(tmp_path / name)
    examples, classes = class_folder(tmp_path)
    assert classes == ["a", "b"]
    assert [(e.id, e.target) for e in examples] == [("a/1.png", 0), ("a/deep/3.png", 0), ("b/2.png", 1)]
    assert examples[0].load().size == (8, 8)


def test_an_image_without_a_class_and_one_of_an_unknown_class(tmp_path):
    image(tmp_path / "shoes" / "1.png")
    with pytest.raises(DataError, match=r"shoes/1.png: 'shoes' is not one of the 2 classes \(nearest: shoe\)"):
        class_folder(tmp_path, ["hat", "shoe"])
    image(tmp_path / "loose.png")
    with pytest.raises(DataError, match=r"loose.png has no label"):
        class_folder(tmp_path)


def test_files_that_rows_name(tmp_path):
    image(tmp_path / "one.png")
    assert named_file(tmp_path, "one.png", "image", "f:1") == tmp_path / "one.png"
    with pytest.raises(DataError, match=r"f:1: no such file.*nearest: one.png"):
        named_file(tmp_path, "ones.png", "image", "f:1")
    with pytest.raises(DataError, match=r"f:2: one.png is not one of audio"):
        named_file(tmp_path, "one.png", "audio", "f:2")
    with pytest.raises(DataError, match=r"f:3: no such file"):
        named_file(tmp_path, "x" * 300 + ".png", "image", "f:3")
    with pytest.raises(DataError, match="f:3: 7 is not the name of a file"):
        named_file(tmp_path, 7, "image", "f:3")
