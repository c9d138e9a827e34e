"""COCO's average precision of boxes, as pycocotools measures it."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from latte_convert.compat import require
from latte_convert.data.boxes import Instances

_ALL = ([0.0, 1e10], "all", 100)  # area range, its name, detections of a class in an image: COCO's AP


def match(instances: Instances, detections: dict[Any, dict[str, Any]]) -> list[list[Any]]:
    """Match detections with boxes, as ``COCOeval.evaluate`` does.

    Args:
        instances: The labels.
        detections: ``boxes (n, 4)`` (x0, y0, x1, y1 in pixels), ``scores (n,)`` and ``categories (n,)`` of each image,
            by its id.

    Returns:
        For each image the evaluation of every category; what ``average_precision`` takes.
    """
    truth, found = require("pycocotools.coco", "eval").COCO(), require("pycocotools.coco", "eval").COCO()
    ids = list(detections)
    shared = {
        "images": [instances.images[image] for image in ids],
        "categories": [{"id": category, "name": name} for category, name in instances.categories.items()],
    }
    truth.dataset = {**shared, "annotations": [dict(box) for image in ids for box in instances.annotations[image]]}
    results = [box for image in ids for box in _results(image, detections[image])]
    found.dataset = {**shared, "annotations": [{**box, "id": i} for i, box in enumerate(results, start=1)]}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools reports its progress with print
        truth.createIndex()
        found.createIndex()
        evaluation = require("pycocotools.cocoeval", "eval").COCOeval(truth, found, "bbox")
        _restrict(evaluation.params, ids, list(instances.categories))
        evaluation.evaluate()
    # COCOeval sorts ids; its evaluations go by category, then by image.
    order = {image: i for i, image in enumerate(evaluation.params.imgIds)}
    size = len(order)
    by_category = [evaluation.evalImgs[k * size : (k + 1) * size] for k in range(len(evaluation.params.catIds))]
    return [[of_one[order[image]] for of_one in by_category] for image in ids]


def average_precision(matches: Sequence[Sequence[Any]]) -> dict[str, float]:
    """COCO's ``ap`` (over IoU 0.50 to 0.95), ``ap50`` and ``ap75`` of some images, repeated ones included.

    Args:
        matches: Images as ``match`` gives them. What was matched inside an image does not depend on the others, so a
            resample needs ``COCOeval.accumulate`` only.

    Returns:
        NaN where there is no box in these images.
    """
    evaluation = require("pycocotools.cocoeval", "eval").COCOeval(iouType="bbox")
    _restrict(evaluation.params, list(range(len(matches))), list(range(len(matches[0]))))
    evaluation._paramsEval = copy.deepcopy(evaluation.params)
    evaluation.evalImgs = [image[k] for k in range(len(matches[0])) for image in matches]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, 0]  # (IoU, recall, category)
    thresholds = evaluation.params.iouThrs
    return {
        "ap": _mean(precision),
        "ap50": _mean(precision[np.isclose(thresholds, 0.5)]),
        "ap75": _mean(precision[np.isclose(thresholds, 0.75)]),
    }


def _restrict(params: Any, images: list[Any], categories: list[int]) -> None:
    area, name, most = _ALL
    params.imgIds, params.catIds = images, sorted(categories)
    params.areaRng, params.areaRngLbl, params.maxDets = [area], [name], [most]


def _results(image: Any, found: dict[str, Any]) -> list[dict[str, Any]]:
    corners = np.asarray(found["boxes"], dtype=np.float64).reshape(-1, 4)
    sizes = corners[:, 2:] - corners[:, :2]
    return [
        {
            "image_id": image, "category_id": int(category), "score": float(score), "iscrowd": 0,
            "bbox": [*map(float, corner), *map(float, size)], "area": float(size[0] * size[1]),
        }
        for corner, size, score, category in zip(
            corners[:, :2], sizes, found["scores"], found["categories"], strict=True
        )
    ]  # fmt: skip


def _mean(precision: Any) -> float:
    """Mean over categories that have boxes; pycocotools marks the others with -1."""
    known = precision[precision > -1]
    return float(known.mean()) if known.size else math.nan
