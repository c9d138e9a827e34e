from __future__ import annotations

import dataclasses
import json

import pytest
from data.coco import instances

from latte_convert.data.boxes import categories_of, read_instances
from latte_convert.errors import DataError


def test_categories_by_name_and_by_number(tmp_path):
    labels = read_instances(instances(tmp_path, [(0, 7, [10, 10, 20, 20])]))
    assert categories_of(["N/A", "Dog", "bird", "cat"], labels, "x") == {1: 3, 3: 7}
    assert categories_of([f"LABEL_{i}" for i in range(9)], labels, "x") == {3: 3, 7: 7}
    with pytest.raises(DataError, match=r"x: 1 categories with boxes are not among .* 2 classes, such as 7 'cat'.*cot"):
        categories_of(["dog", "cot"], labels, "x")
    # As RT-DETR's published checkpoints spell them.
    names = {1: "motorcycle", 2: "airplane", 3: "couch", 4: "potted plant", 5: "dining table", 6: "tv"}
    coco = dataclasses.replace(labels, categories=names)
    coco.annotations[0].clear()
    spelt = ["motorbike", "aeroplane", "sofa", "pottedplant", "diningtable", "tvmonitor"]
    assert categories_of(spelt, coco, "x") == {i: i + 1 for i in range(6)}


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(0, 7, [10, 10, 20, 20]), (9, 7, [1, 1, 2, 2])], r"\(annotations\[1\]\): a box of image 9, which"),
        ([(0, 5, [10, 10, 20, 20])], r"\(annotations\[0\]\): category 5 is not one of the 2"),
        ([(0, 7, [90, 10, 20, 20])], r"box \[90, 10, 20, 20\] .* lies outside its image of 100x80 pixels \(0.png\)"),
        ([(0, 7, [10, 70, 20, 20])], "lies outside its image"),
        ([(0, 7, [-5, 10, 20, 20])], "lies outside its image"),
        ([(0, 7, [10, 10, -3, 20])], "lies outside its image"),
        ([(0, 7, [10, 10, 20])], r"'bbox' is \[10, 10, 20\], not \[x, y, width, height\]"),
        ([(0, 7, [10, 10, 20, 10**400])], "'bbox' is .*000"),
        ([(0, 7, [10, 10, 20, 10**400])], r"'bbox' is \[10, 10, 20, 1000"),
        ([(0, None, [10, 10, 20, 20])], "'category_id' is empty"),
        ([], "no box in it"),
    ],
)
def test_bad_boxes_are_named(boxes, message, tmp_path):
    path = instances(tmp_path, boxes)
    with pytest.raises(DataError, match=r"instances.json.*" + message) as error:
        read_instances(path)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("crowd", ["yes", [1], 0.5, 7])
def test_a_crowd_is_marked_by_0_or_1(crowd, tmp_path):
    path = instances(tmp_path, [(0, 7, [10, 10, 20, 20])])
    document = json.loads(path.read_text())
    document["annotations"][0]["iscrowd"] = crowd
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"\(annotations\[0\]\): 'iscrowd' is .*, not 0 or 1"):
        read_instances(path)


def test_ids_are_of_one_kind_and_unique(tmp_path):
    path = instances(tmp_path, [(0, 7, [10, 10, 20, 20])])
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "images": [*document["images"], {**document["images"][0], "id": "a"}]}))
    with pytest.raises(DataError, match="ids of images are numbers and texts"):
        read_instances(path)
    path.write_text(json.dumps({**document, "categories": [*document["categories"], {"id": 7, "name": "other"}]}))
    with pytest.raises(DataError, match=r"\(categories\[\d\]\): category 7 is there twice"):
        read_instances(path)


def test_two_categories_of_one_name_cannot_be_told_apart(tmp_path):
    path = instances(tmp_path, [(0, 7, [10, 10, 20, 20])])
    document = json.loads(path.read_text())
    name = document["categories"][0]["name"]
    path.write_text(json.dumps({**document, "categories": [*document["categories"], {"id": 99, "name": name}]}))
    with pytest.raises(DataError, match=f"have the same name, '{name}'"):
        categories_of([name, "other"], read_instances(path), str(path))


def test_the_line_of_a_box(tmp_path):
    path = instances(tmp_path, [(0, 7, [10, 10, 20, 20]), (0, 7, [90, 10, 20, 20])])
    path.write_text(json.dumps(json.loads(path.read_text()), indent=0))
    number = path.read_text().splitlines().index("90,") + 1  # "[" stands before it, "bbox", the two ids and "{"
    with pytest.raises(DataError, match=rf"instances.json:{number - 5} \(annotations\[1\]\)"):
        read_instances(path)


def test_a_rounded_box_at_the_border_is_fine(tmp_path):
    assert read_instances(instances(tmp_path, [(0, 7, [80.2, 60.4, 20.0, 19.7])])).annotations[0]
