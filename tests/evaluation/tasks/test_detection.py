from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from data.coco import official
from PIL import Image
from tiny_parts import rt_detr_config

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.boxes import read_instances
from latte_convert.errors import DataError, GateError, InputError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.base import Setting
from latte_convert.evaluation.tasks.detection import DetectionTask
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

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
    config = rt_detr_config()
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
    with pytest.raises(DataError, match=r"instances.json: 10 categories with boxes are not among the detector's 10"):
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
