"""``detection``: COCO's average precision of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from latte_convert.compat import require
from latte_convert.data.boxes import categories_of, read_instances
from latte_convert.data.choice import choose
from latte_convert.data.decode import Value
from latte_convert.data.examples import Example, file_loader, named_file
from latte_convert.data.feed import Inputs, run
from latte_convert.data.label_files import image_folder, label_files, one
from latte_convert.errors import DataError
from latte_convert.evaluation.average_precision import average_precision, match
from latte_convert.evaluation.class_names import class_names
from latte_convert.evaluation.tasks.base import Metric, Task, require_two

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint

_PROMPTED = ("OwlViT", "Owlv2", "GroundingDino", "MMGroundingDino", "OmDetTurbo")


class DetectionTask(Task):
    """AP, AP50 and AP75 of all detections, by pycocotools; boxes come from the checkpoint's own post-processing.

    The bootstrap draws images: their matches are computed once, and every resample is accumulated anew.

    Data: COCO's ``instances_*.json``, or the folder of it; with the folder of the images as a second place where it
    does not lie beside.
    """

    name = "detection"
    metrics = (Metric("ap"), Metric("ap50"), Metric("ap75"))
    resamples = 100  # pycocotools takes about two seconds for both models on 5,000 images

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must detect objects of fixed classes."""
        if source.library != "transformers" or not source.model_class.endswith("ForObjectDetection"):
            return "it detects no objects"
        if source.model_class.startswith(_PROMPTED):
            return "it detects what a text asks for, no fixed classes"
        return None

    def open(self) -> list[Example]:
        """One example an image; its entry is the target."""
        files, folders = label_files(self.setting.data, ("instances*.json", "*.json"))
        file = one(files)
        require("pycocotools.coco", "eval")
        self._instances = read_instances(file)
        self._categories = categories_of(class_names(self.setting.source), self._instances, str(file))
        where, images = self._instances.where, self._instances.images
        chosen = choose(list(images), self.setting.samples, self.setting.seed, str)
        require_two(len(chosen), str(file))
        if not any(self._instances.annotations[image] for image in chosen):
            raise DataError(f"{file}: none of the {len(chosen)} chosen images has a box: raise --samples.")
        folder = image_folder(folders, images[chosen[0]]["file_name"], where[chosen[0]])
        paths = [named_file(folder, images[i]["file_name"], "image", where[i]) for i in chosen]
        return [
            Example(images[i]["file_name"], "image", file_loader(path, "image"), images[i])
            for i, path in zip(chosen, paths, strict=True)
        ]

    def prepare(self, example: Example, value: Value, model: nn.Module) -> Inputs:
        """The checkpoint's own preprocessing.

        Raises:
            DataError: The image has another size than the labels say, so that its boxes are elsewhere.
        """
        said = (example.target["width"], example.target["height"])
        if isinstance(value, Image.Image) and value.size != said:
            where = self._instances.where[example.target["id"]]
            raise DataError(
                f"{where}: {example.id} has {value.size[0]}x{value.size[1]} pixels, the labels say {said[0]}x{said[1]}."
            )
        return super().prepare(example, value, model)

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Boxes (x0, y0, x1, y1 in pixels of the file), scores and categories of all detections, and a raw extreme."""
        output = run(model, inputs)
        raw = SimpleNamespace(logits=output.logits.float(), pred_boxes=output.pred_boxes.float())
        sizes = [(example.target["height"], example.target["width"]) for example in examples]
        processor: Any = self.setting.processor("image")
        found = processor.apply.post_process_object_detection(raw, threshold=0.0, target_sizes=sizes)
        # Post-processing drops what is not finite: the largest raw output tells.
        peaks = np.maximum(*(part.flatten(1).abs().amax(1).cpu().numpy() for part in (raw.logits, raw.pred_boxes)))
        return [self._known(one, float(peak)) for one, peak in zip(found, peaks, strict=True)]

    def _known(self, found: dict[str, Any], peak: float) -> dict[str, Any]:
        """Detections of classes that are categories."""
        classes = found["labels"].cpu().numpy()
        kept = np.isin(classes, list(self._categories))
        return {
            "boxes": found["boxes"].cpu().numpy()[kept],
            "scores": found["scores"].cpu().numpy()[kept],
            "categories": np.array([self._categories[i] for i in classes[kept]], dtype=np.int64),
            "peak": peak,
        }

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> list[list[Any]]:
        """Matches of every image."""
        pairs = zip(examples, predictions, strict=True)
        return match(self._instances, {example.target["id"]: found for example, found in pairs})

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Average precision; NaN where no image has a box."""
        return average_precision(records)
