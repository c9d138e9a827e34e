"""``zero-shot``: classification by the nearest prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latte_convert.data.choice import choose
from latte_convert.data.examples import Example, class_folder
from latte_convert.data.label_files import split_folder
from latte_convert.errors import DataError, nearest
from latte_convert.evaluation.ranks import accuracies, rank_of
from latte_convert.evaluation.tasks.base import Metric
from latte_convert.evaluation.two_tower import TwoTowerTask, embeddings, text_examples
from latte_convert.reading import Unreadable, read_text

TEMPLATE = "a photo of a {}."
"""The prompt where no file of templates is given: the one of CLIP's paper."""
_MOST_BYTES = 1 << 20
"""Of a file of templates."""


class ZeroShotTask(TwoTowerTask):
    """A class is the mean of its prompts' embeddings, of length 1; an image belongs to the nearest class (CLIP, 2021).

    Each of the two models embeds the prompts with its own text tower.

    Data: a folder of images in a folder a class, whose name is what the prompt says, with ``_`` for a space; or a
    folder with such folders ``train`` and ``test``, of which ``test`` is read.
    """

    name = "zero-shot"
    metrics = (Metric("accuracy"), Metric("top5"))

    def open(self) -> list[Example]:
        """Images first, then the prompts."""
        images, folders = class_folder(split_folder(self.setting.place))
        if len(folders) < 2:
            raise DataError(f"{self.setting.data[0]} has images of one class only ('{folders[0]}'): two are needed.")
        images = choose(images, self.setting.samples, self.setting.seed, lambda example: example.id)
        self._prompts: list[list[str]] = []
        owners: dict[str, str] = {}
        templates = read_templates(self.setting.templates)
        for folder in folders:
            prompts = [template.replace("{}", folder.replace("_", " ").strip()) for template in templates]
            if prompts[0] in owners:
                raise DataError(
                    f"{self.setting.data[0]}: '{folder}' and '{owners[prompts[0]]}' give the same prompt "
                    f"({prompts[0]!r}): merge or rename them."
                )
            owners |= dict.fromkeys(prompts, folder)
            self._prompts.append(prompts)
        return images + text_examples({prompt: f"prompt {prompt!r}" for prompt in owners})

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """Rank of the right class for every image, ``(N,)``."""
        texts = embeddings(examples, predictions, "text")
        means = np.stack([np.mean([texts[prompt] for prompt in prompts], 0) for prompts in self._prompts])
        classes = means / np.linalg.norm(means, axis=1, keepdims=True).clip(1e-12)
        pairs = zip(examples, predictions, strict=True)
        return np.array([rank_of(classes @ v, example.target) for example, v in pairs if example.modality == "image"])

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Share of images whose class is nearest; among the five nearest, where there are more than five."""
        return accuracies(np.asarray(records), len(self._prompts))


def read_templates(path: Path | None) -> list[str]:
    """Prompt templates, one a line, each with ``{}`` where the class goes.

    Raises:
        DataError: The file cannot be read, has no template, or has a line without ``{}``.
    """
    if path is None:
        return [TEMPLATE]
    try:
        lines = read_text(path.expanduser(), _MOST_BYTES).splitlines()
    except (FileNotFoundError, RuntimeError, Unreadable) as error:  # RuntimeError: the home of nobody
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{path}: templates cannot be read: {error} ({nearest(path.name, siblings)}).") from None
    templates = {line.strip(): number for number, line in enumerate(lines, start=1) if line.strip()}
    for line, number in templates.items():
        if line.count("{}") != 1:
            raise DataError(f"{path}:{number}: {line!r} needs {{}} once, where the class goes.")
    if not templates:
        raise DataError(f"{path} has no template: write one a line, such as {TEMPLATE!r}.")
    return list(templates)
