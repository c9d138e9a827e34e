from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers
from adapters.tiny_models import _rt_detr_config
from PIL import Image

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import DataError, GateError, InputError
from latte_convert.evaluation.boxes import average_precision, categories_of, match, read_instances
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.base import Setting
from latte_convert.evaluation.tasks.detection import DetectionTask
from latte_convert.recipe import Recipe

pytest.importorskip("pycocotools", reason="pycocotools is not installed: pip install 'latte-convert[eval]'")

SCENES = 40


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """Held-out scenes in COCO's layout."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'latte-convert[demo]'")
    from scenes import write_scenes

    root = tmp_path_factory.mktemp("boxes")
    write_scenes(root, "heldout", SCENES)
    return root


@pytest.fixture(scope="module")
def detr_artifact(tiny_models, boxes, tmp_path_factory):
    """The trained tiny DETR with the last layer of its encoder converted."""
    recipe = Recipe(kernel="latte", samples=4, k=1, include=("*encoder.layers.2.self_attn",))
    result = latte_convert.convert(tiny_models / "tiny-detr", boxes / "images", recipe=recipe)
    return result.save(tmp_path_factory.mktemp("detr") / "hybrid")


def test_average_precision_as_the_training_script_has_it(detr_artifact, tiny_models, boxes):
    """The script post-processes and runs COCOeval by itself, end to end."""
    import scenes
    import train_tiny_detr

    report = evaluate(detr_artifact, "detection", [boxes], batch_size=16)
    drawn = [scenes.render("heldout", index) for index in range(SCENES)]
    original, processor = train_tiny_detr.load(tiny_models / "tiny-detr")
    for which, model in (("original", original), ("hybrid", latte_convert.load(detr_artifact))):
        wanted = train_tiny_detr.evaluate(model, processor, drawn)
        assert getattr(report.metrics["ap"], which) == pytest.approx(wanted["AP"], abs=1e-6)
        assert getattr(report.metrics["ap50"], which) == pytest.approx(wanted["AP50"], abs=1e-6)
    assert report.metrics["ap50"].original > 0.7
    low, high = report.metrics["ap"].interval
    assert low < report.metrics["ap"].retention < high
    assert (report.primary, report.samples, report.resamples) == ("ap", SCENES, 100)


# --- the measure ------------------------------------------------------------------------------------------


def instances(folder, boxes, count=3, **more):
    """Labels of ``(image, category, box)`` in images of 100x80 pixels."""
    document = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 100, "height": 80} for i in range(count)],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
        "annotations": [
            {"id": i, "image_id": image, "category_id": category, "bbox": box, **more}
            for i, (image, category, box) in enumerate(boxes)
        ],
    }
    path = folder / "instances.json"
    path.write_text(json.dumps(document))
    return path


def found(*rows):
    """Detections of ``(category, score, x0, y0, x1, y1)``."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 6)
    return {"categories": table[:, 0].astype(int), "scores": table[:, 1], "boxes": table[:, 2:]}


def test_average_precision_by_hand(tmp_path):
    labels = read_instances(
        instances(tmp_path, [(0, 7, [10, 10, 20, 20]), (1, 7, [0, 0, 40, 40]), (1, 3, [5, 5, 10, 10])])
    )
    exact = {
        0: found((7, 0.9, 10, 10, 30, 30)),
        1: found((7, 0.8, 0, 0, 40, 40), (3, 0.3, 5, 5, 15, 15)),
        2: found(),
    }
    assert average_precision(match(labels, exact)) == {"ap": 1.0, "ap50": 1.0, "ap75": 1.0}
    # A cat that is not there, surer than the first of two: precision 1/2 at recall 1/2 and 2/3 at recall 1, made
    # monotone 2/3 throughout. The dog overlaps by 8 of 10 rows, IoU 0.8: right at 0.50 to 0.80, 7 of 10 thresholds.
    worse = {
        0: found((7, 0.9, 10, 10, 30, 30)),
        1: found((7, 0.8, 0, 0, 40, 40), (3, 0.3, 5, 5, 15, 13)),
        2: found((7, 0.95, 50, 50, 60, 60)),
    }
    score = average_precision(match(labels, worse))
    assert score["ap50"] == pytest.approx((2 / 3 + 1) / 2, abs=1e-6)
    assert score["ap75"] == pytest.approx((2 / 3 + 1) / 2, abs=1e-6)
    assert score["ap"] == pytest.approx((2 / 3 + 7 / 10) / 2, abs=1e-6)


def random_case(folder, seed=0, count=12):
    """Labels and jittered detections of both categories."""
    rng = np.random.default_rng(seed)
    boxes, detections = [], {}
    for image in range(count):
        rows = []
        for _ in range(rng.integers(0, 5)):
            x, y, w, h = rng.uniform(0, 40, 2).tolist() + rng.uniform(5, 30, 2).tolist()
            category = int(rng.choice([3, 7]))
            boxes.append((image, category, [x, y, w, h]))
            shift = rng.normal(0, 2.5, 4)
            rows.append(
                (
                    category if rng.random() < 0.8 else 10 - category,
                    rng.random(),
                    *(np.array([x, y, x + w, y + h]) + shift),
                )
            )
        detections[image] = found(*rows)
    return read_instances(instances(folder, boxes, count)), detections


def official(labels, detections, images):
    """``COCOeval`` with its own settings on these images, repeated ones as new images."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO()
    truth.dataset = {"info": {}, "images": [{"id": i + 1} for i in range(len(images))], "annotations": []}
    truth.dataset["categories"] = [{"id": k, "name": v} for k, v in labels.categories.items()]
    results = []
    for i, image in enumerate(images, start=1):
        for box in labels.annotations[image]:
            truth.dataset["annotations"].append({**box, "image_id": i, "id": len(truth.dataset["annotations"]) + 1})
        one = detections[image]
        for category, score, (x0, y0, x1, y1) in zip(one["categories"], one["scores"], one["boxes"], strict=True):
            box = [x0, y0, x1 - x0, y1 - y0]
            results.append({"image_id": i, "category_id": int(category), "score": float(score), "bbox": box})
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        measure = COCOeval(truth, truth.loadRes(results), "bbox")
        measure.evaluate()
        measure.accumulate()
        measure.summarize()
    return dict(zip(("ap", "ap50", "ap75"), measure.stats[:3].tolist(), strict=True))


def test_resamples_are_those_of_repeated_images(tmp_path):
    labels, detections = random_case(tmp_path)
    matches = match(labels, detections)
    rng = np.random.default_rng(1)
    for images in (list(range(12)), *(rng.integers(12, size=12).tolist() for _ in range(4))):
        score = average_precision([matches[i] for i in images])
        assert score == pytest.approx(official(labels, detections, images), abs=1e-12)
        assert 0 < score["ap"] < 1


def test_no_box_is_undefined_and_crowds_are_no_misses(tmp_path):
    box = (0, 7, [10, 10, 20, 20])
    labels = read_instances(instances(tmp_path, [box]))
    matches = match(labels, {i: found() for i in range(3)})
    assert all(math.isnan(value) for value in average_precision([matches[1], matches[2]]).values())
    assert average_precision(matches)["ap"] == 0
    crowd = read_instances(instances(tmp_path, [box], iscrowd=1))
    assert math.isnan(average_precision(match(crowd, {i: found() for i in range(3)}))["ap"])


# --- classes, and other detectors -------------------------------------------------------------------------


def test_categories_by_name_and_by_number(tmp_path):
    labels = read_instances(instances(tmp_path, [(0, 7, [10, 10, 20, 20])]))
    assert categories_of(["N/A", "Dog", "bird", "cat"], labels, "x") == {1: 3, 3: 7}
    assert categories_of([f"LABEL_{i}" for i in range(9)], labels, "x") == {3: 3, 7: 7}
    with pytest.raises(DataError, match=r"x: 1 categories with boxes are none of .* 2 classes, such as 7 'cat'.*cot"):
        categories_of(["dog", "cot"], labels, "x")
    # As RT-DETR's published checkpoints spell them.
    names = {1: "motorcycle", 2: "airplane", 3: "couch", 4: "potted plant", 5: "dining table", 6: "tv"}
    coco = dataclasses.replace(labels, categories=names)
    coco.annotations[0].clear()
    spelt = ["motorbike", "aeroplane", "sofa", "pottedplant", "diningtable", "tvmonitor"]
    assert categories_of(spelt, coco, "x") == {i: i + 1 for i in range(6)}


# What the photographs of tests/data show: category and [x, y, width, height].
SUBJECTS = {
    "astronaut.jpg": (1, [18, 2, 240, 348]),
    "cameraman.jpg": (1, [88, 40, 130, 270]),
    "cat.jpg": (17, [40, 2, 380, 296]),
    "coffee.jpg": (47, [110, 30, 200, 190]),
    "rocket.jpg": (5, [130, 60, 40, 320]),
}


@pytest.fixture(scope="module")
def coco(photos, tmp_path_factory):
    """Five photographs of different sizes, labelled and stored as COCO's validation set."""
    root = tmp_path_factory.mktemp("coco")
    (root / "annotations").mkdir()
    (root / "val2017").mkdir()
    names = {1: "person", 5: "airplane", 17: "cat", 47: "cup"}
    document = {"categories": [{"id": k, "name": v} for k, v in names.items()], "images": [], "annotations": []}
    for number, (name, (category, box)) in enumerate(SUBJECTS.items(), 100):
        shutil.copy(photos / name, root / "val2017")
        with Image.open(photos / name) as photo:
            size = {"width": photo.width, "height": photo.height}
        document["images"].append({"id": number, "file_name": name, **size})
        document["annotations"].append({"id": number, "image_id": number, "category_id": category, "bbox": box})
    (root / "annotations" / "instances_val2017.json").write_text(json.dumps(document))
    return root


@torch.no_grad()
def test_rt_detr_on_photographs_of_different_sizes(coco, tmp_path):
    torch.manual_seed(0)
    names = [c["name"] for c in json.loads((coco / "annotations" / "instances_val2017.json").read_text())["categories"]]
    config = _rt_detr_config()
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    model = transformers.RTDetrForObjectDetection(config).eval()
    model.save_pretrained(tmp_path / "source")
    processor = transformers.RTDetrImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path / "source")
    recipe = Recipe(kernel="latte", samples=2, holdout=0.5, k=1)
    artifact = latte_convert.convert(tmp_path / "source", coco / "val2017", recipe=recipe).save(tmp_path / "out")
    report = evaluate(artifact, "detection", [coco])
    labels = read_instances(coco / "annotations" / "instances_val2017.json")
    detections = {}
    for image, entry in labels.images.items():
        photo = Image.open(coco / "val2017" / entry["file_name"]).convert("RGB")
        one = processor.post_process_object_detection(
            model(**processor(photo, return_tensors="pt")), threshold=0.0, target_sizes=[photo.size[::-1]]
        )[0]
        ids = {i: category for i, name in enumerate(names) for category, n in labels.categories.items() if n == name}
        categories = np.array([ids[i] for i in one["labels"].tolist()])
        detections[image] = {"categories": categories, "scores": one["scores"].numpy(), "boxes": one["boxes"].numpy()}
    wanted = official(labels, detections, list(labels.images))
    assert {name: metric.original for name, metric in report.metrics.items()} == pytest.approx(wanted, abs=1e-7)
    # A random detector finds nothing, so the boxes themselves must agree too.
    task = DetectionTask(Setting(resolve(tmp_path / "source"), (str(coco),)))
    example = task.examples[1]
    (result,) = task.predict(model, task.prepare(example, example.load(), model), [example])
    np.testing.assert_allclose(result["boxes"], detections[example.target["id"]]["boxes"], atol=1e-3)
    np.testing.assert_array_equal(result["categories"], detections[example.target["id"]]["categories"])


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(0, 7, [10, 10, 20, 20]), (9, 7, [1, 1, 2, 2])], r"\(annotations\[1\]\): a box of image 9, which"),
        ([(0, 5, [10, 10, 20, 20])], r"\(annotations\[0\]\): category 5 is none of the 2"),
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


def test_bad_data(detr_artifact, dino_artifact, boxes, tmp_path):
    with pytest.raises(InputError, match="'detection' does not fit Dinov2Model: it detects no objects"):
        evaluate(dino_artifact, "detection", [boxes])
    root = tmp_path / "data"
    shutil.copytree(boxes, root)
    with pytest.raises(DataError, match="1 usable sample"):
        evaluate(detr_artifact, "detection", [root], samples=1)
    Image.new("RGB", (40, 40)).save(next((root / "images").iterdir()))
    with pytest.raises(
        DataError, match=r"instances.json:1 \(images\[\d+\]\): .* has 40x40 pixels, the labels say 96x96"
    ):
        evaluate(detr_artifact, "detection", [root])
    document = json.loads((root / "instances.json").read_text())
    document["categories"] = [{**c, "name": f"thing {c['name']}"} for c in document["categories"]]
    (root / "instances.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"instances.json: 10 categories with boxes are none of the detector's 10"):
        evaluate(detr_artifact, "detection", [root])
    shutil.copy(root / "instances.json", root / "instances_2.json")
    with pytest.raises(DataError, match="several label files"):
        evaluate(detr_artifact, "detection", [root])


def test_an_output_that_is_not_finite_is_no_empty_picture(detr_artifact, boxes, monkeypatch):
    from latte_convert.kernels.latte.kernel import LatteKernel

    attend = LatteKernel.attend
    monkeypatch.setattr(LatteKernel, "attend", lambda *args, **kwargs: attend(*args, **kwargs) * np.nan)
    with pytest.raises(GateError, match="hybrid's output is not finite on"):
        evaluate(detr_artifact, "detection", [boxes], samples=3)
