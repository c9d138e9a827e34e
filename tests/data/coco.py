"""Small label files in COCO's layout, and pycocotools' own evaluation."""

from __future__ import annotations

import contextlib
import io
import json


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
