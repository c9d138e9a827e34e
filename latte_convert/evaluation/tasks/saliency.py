"""``saliency``: how alike the two models' heatmaps are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from latte_convert.compat import require
from latte_convert.data.examples import Example
from latte_convert.data.samples import SampleSet
from latte_convert.data.sources import missing_path
from latte_convert.errors import DataError
from latte_convert.evaluation.features import image_tokens, no_image_features
from latte_convert.evaluation.tasks.base import Metric, Task
from latte_convert.evaluation.unlabelled import examples_of, open_unlabelled

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.data.feed import Inputs


class SaliencyTask(Task):
    """Pearson correlation of the original's and the hybrid's map of an image, the measure CC of saliency benchmarks.

    The map is what ``--decoder`` makes of the patch features: an ONNX file that takes ``(B, D, height, width)`` and
    gives one map an image. Without one it is the cosine of every patch with the CLS token, or with the mean of all
    patches where there is no CLS: no trained head and no attention map, which a converted layer does not have.
    """

    name = "saliency"
    metrics = (Metric("pearson"),)
    note = "The original's map is the reference: its own correlation is 1."

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must have patches on a grid."""
        if source.library == "open_clip":
            return "open_clip models give no patch tokens"
        return no_image_features(source)

    def open(self) -> Sequence[Example]:
        """Images, without labels."""
        self._session = self._open_decoder()
        samples: list[SampleSet] = open_unlabelled(self.setting, ["image"])
        return examples_of(samples)

    def _open_decoder(self) -> Any:
        if self.setting.decoder is None:
            return None
        if not self.setting.decoder.is_file():
            raise missing_path(str(self.setting.decoder))
        runtime = require("onnxruntime", "export")
        try:
            return runtime.InferenceSession(str(self.setting.decoder), providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors share no public base class
            raise DataError(f"{self.setting.decoder} is no decoder that ONNX Runtime can run: {error}.") from None

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[Any]:
        """Flat heatmaps, ``(pixels,)`` an image."""
        tokens, prefix = image_tokens(model, inputs)
        patches = tokens[:, prefix:]
        if self._session is None:
            summary = tokens[:, :1] if prefix else patches.mean(1, keepdim=True)
            return list(torch.nn.functional.cosine_similarity(patches, summary, dim=-1).numpy())
        images = next(value for value in inputs.kwargs.values() if getattr(value, "ndim", 0) == 4)
        height = round(math.sqrt(patches.shape[1] * images.shape[2] / images.shape[3]))
        features = patches.transpose(1, 2).reshape(len(patches), patches.shape[2], height, -1).numpy()
        try:
            maps = self._session.run(None, {self._session.get_inputs()[0].name: features})[0]
        except Exception as error:
            raise DataError(f"{self.setting.decoder} does not take features {features.shape}: {error}.") from None
        return list(maps.reshape(len(examples), -1))

    def compare(self, original: Sequence[Any], hybrid: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Correlation of each image's two maps; the original's with itself is 1."""
        pairs = zip(original, hybrid, strict=True)
        return [pearson(a, a) for a in original], [pearson(a, b) for a, b in pairs]

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """One correlation an image."""
        return np.array(predictions, dtype=np.float64)

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Mean correlation."""
        return {"pearson": float(np.mean(records))}


def pearson(reference: Any, other: Any) -> float:
    """Correlation of two maps: 0 where only ``other`` is flat, NaN where the reference is."""
    if np.ptp(reference) == 0:
        return math.nan
    return float(np.corrcoef(reference, other)[0, 1]) if np.ptp(other) > 0 else 0.0
