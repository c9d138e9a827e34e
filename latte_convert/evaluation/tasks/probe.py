"""Frozen features of train and test images, and a classifier on top: what ``knn`` and ``linear-probe`` share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latte_convert.data.choice import choose
from latte_convert.data.examples import Example, class_folder
from latte_convert.errors import DataError, UsageError
from latte_convert.evaluation.features import image_features, no_image_features
from latte_convert.evaluation.tasks.base import Metric, Task

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.data.feed import Inputs

_TEST_FOLDERS = ("test", "val", "valid", "validation")


TRAIN = "train"


class ProbeTask(Task):
    """Fits a classifier to the features of the training images and scores it on those of the test images.

    Data: ``DATA/train/CLASS/*.jpg`` beside ``DATA/test/CLASS/*.jpg`` (or ``val``), or the two folders as two places.
    """

    metrics = (Metric("accuracy"),)
    note = "Each model's own features train its own classifier on the training images; the test images are scored."

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must have a vector for an image."""
        return no_image_features(source)

    def open(self) -> list[Example]:
        """Training images first, all of them; then at most ``samples`` test images."""
        train, test = self._folders()
        fitting, classes = class_folder(train)
        if len(classes) < 2:
            raise DataError(f"{train} has images of one class only ('{classes[0]}'); a classifier needs two.")
        scored, _ = class_folder(test, classes)
        scored = choose(scored, self.setting.samples, self.setting.seed, lambda example: example.id)
        return [_of_split(example, split) for split, part in ((TRAIN, fitting), ("test", scored)) for example in part]

    def _folders(self) -> tuple[Path, Path]:
        if len(self.setting.data) == 2:
            train, test = (Path(place).expanduser() for place in self.setting.data)
        elif len(self.setting.data) == 1:
            root = self.setting.place
            train = root / "train"
            test = next((root / name for name in _TEST_FOLDERS if (root / name).is_dir()), root / "test")
        else:
            raise UsageError(f"'{self.name}' reads one folder with train/ and test/ in it, or those two folders.")
        for folder in (train, test):
            if not folder.is_dir():
                raise DataError(
                    f"there is no folder {folder}: '{self.name}' needs train/CLASS/ and test/CLASS/ images."
                )
        return train, test

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[Any]:
        """Features, ``(D,)`` an image."""
        return list(image_features(model, inputs).numpy())

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """1 for each test image that the classifier gets right, 0 for the others."""
        splits, targets = map(np.array, zip(*(example.target for example in examples), strict=True))
        features, fitting = np.stack(predictions), splits == TRAIN
        if len(set(targets[fitting])) < 2:
            raise DataError(f"{', '.join(self.setting.data)}: fewer than two classes have usable training images.")
        if fitting.all():
            raise DataError(f"{', '.join(self.setting.data)}: no test image could be used.")
        guesses = self.classify(features[fitting], targets[fitting], features[~fitting])
        return (guesses == targets[~fitting]).astype(np.float64)

    @abstractmethod
    def classify(self, train: Any, targets: Any, test: Any) -> Any:
        """Guessed classes ``(M,)`` of features ``test (M, D)``, from ``train (N, D)`` and their classes ``(N,)``."""

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Share of test images that are right."""
        return {"accuracy": float(np.mean(records))}


def _of_split(example: Example, split: str) -> Example:
    """The example with its split in its id and target ``(split, class)``."""
    return replace(example, id=f"{split}/{example.id}", target=(split, example.target))
