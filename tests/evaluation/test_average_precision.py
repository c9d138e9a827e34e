from __future__ import annotations

import math

import numpy as np
import pytest
from data.coco import instances, official

from latte_convert.data.boxes import read_instances
from latte_convert.evaluation.average_precision import average_precision, match

pytest.importorskip("pycocotools", reason="pycocotools is not installed: pip install 'latte-convert[eval]'")


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
