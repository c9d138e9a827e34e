"""``compositional``: the right caption against a hard wrong one, in the layout of SugarCrepe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from latte_convert.data.choice import choose
from latte_convert.data.examples import Example, file_loader, named_file
from latte_convert.data.json_file import JsonFile, field
from latte_convert.data.label_files import image_folder, label_files
from latte_convert.errors import DataError
from latte_convert.evaluation.tasks.base import Metric, require_two
from latte_convert.evaluation.two_tower import TwoTowerTask, embeddings, text_examples


class Trial(NamedTuple):
    """An entry: ``FILE:LINE``, the stem of its file, the image, its caption and the negative."""

    where: str
    part: str
    image: str
    caption: str
    negative: str


class CompositionalTask(TwoTowerTask):
    """Share of images that are nearer to their caption than to its negative (SugarCrepe, NeurIPS 2023).

    A tie is wrong. With several files the accuracy is over all entries, and ``accuracy@FILE`` that of each file.

    Data: a JSON file ``{id: {filename, caption, negative_caption}}``, or a folder of such files (``add_obj.json``,
    ``swap_att.json``, …); with the folder of the images as a second place where it does not lie beside.
    """

    name = "compositional"
    metrics = (Metric("accuracy"),)

    def open(self) -> list[Example]:
        """Images first, then each different caption once."""
        files, folders = label_files(self.setting.data, ("*.json",))
        self._parts = [file.stem for file in files]
        trials = [trial for file in files for trial in _read(file)]
        trials = choose(trials, self.setting.samples, self.setting.seed, lambda trial: trial.where)
        require_two(len(trials), self.setting.data[0])
        self._trials = trials
        folder = image_folder(folders, trials[0].image, trials[0].where)
        places = {trial.image: trial.where for trial in reversed(trials)}
        paths = {name: named_file(folder, name, "image", where) for name, where in reversed(places.items())}
        images = [Example(name, "image", file_loader(path, "image"), name) for name, path in paths.items()]
        return images + text_examples(
            {text: trial.where for trial in reversed(trials) for text in (trial.caption, trial.negative)}
        )

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """Whether each entry is right, and the number of its file, ``(N, 2)``."""
        images, texts = (embeddings(examples, predictions, modality) for modality in ("image", "text"))
        rows = [
            (
                float(images[trial.image] @ texts[trial.caption] > images[trial.image] @ texts[trial.negative]),
                self._parts.index(trial.part),
            )
            for trial in self._trials
            if trial.image in images
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 2)

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Accuracy over all entries, and of each file where there are several."""
        right, part = np.asarray(records).T
        result = {"accuracy": float(right.mean())}
        if len(self._parts) > 1:
            for number, name in enumerate(self._parts):
                own = right[part == number]
                result[f"accuracy@{name}"] = float(own.mean()) if len(own) else math.nan
        return result


def _read(file: Path) -> list[Trial]:
    """All entries of a file.

    Raises:
        DataError: A member is missing, or the two captions are the same.
    """
    trials = []
    for where, entry in JsonFile(file).entries():
        name, right, wrong = (field(entry, key, str, where) for key in ("filename", "caption", "negative_caption"))
        if right == wrong:
            raise DataError(f"{where}: caption and negative_caption are the same: {right!r}.")
        trials.append(Trial(where, file.stem, name, right, wrong))
    if not trials:
        raise DataError(f"{file}: no entry in it.")
    return trials
