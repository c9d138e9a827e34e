"""``classification``: accuracy of a model's own head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from latte_convert.data.choice import choose
from latte_convert.data.columns import cell, text_cell
from latte_convert.data.examples import Example, class_folder, text_loader
from latte_convert.data.feed import Inputs, run
from latte_convert.data.label_files import split_folder
from latte_convert.data.tables import open_table
from latte_convert.evaluation.class_names import ClassNames, class_names
from latte_convert.evaluation.ranks import accuracies, rank_of
from latte_convert.evaluation.tasks.base import Metric, Task

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint

_HEADS = ("ForImageClassification", "ForImageClassificationWithTeacher", "ForSequenceClassification")
_TEXT = ("text", "sentence", "content", "review")
_LABEL = ("label", "labels", "class", "category")


class ClassificationTask(Task):
    """Top-1 and top-5 accuracy over all classes of the head; labels are matched with the checkpoint's own names.

    Data for images: a folder in a folder a class (or ``train`` and ``test`` with such folders, of which ``test`` is
    read). For texts: a ``.csv``, ``.tsv``, ``.jsonl`` or ``.parquet`` file with the columns ``text`` and ``label``.
    """

    name = "classification"
    metrics = (Metric("accuracy"), Metric("top5"))

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must have a head with two classes or more, over images or over texts."""
        if source.library == "open_clip" or (
            source.library == "transformers" and not source.model_class.endswith(_HEADS)
        ):
            return "it has no classification head"
        if tuple(source.modalities) not in (("image",), ("text",)):
            return f"it takes {' and '.join(source.modalities)}; this task reads images or texts"
        count = len(class_names(source))
        return None if count > 1 else f"its head has {count} output{'s' * (count != 1)}, no classes"

    def open(self) -> list[Example]:
        """One example an image or text; the target is the index of its class in the head."""
        self._classes = ClassNames(class_names(self.setting.source))
        examples = self._images() if self.setting.source.modalities == ("image",) else self._texts()
        return choose(examples, self.setting.samples, self.setting.seed, lambda example: example.id)

    def _images(self) -> list[Example]:
        root = split_folder(self.setting.place)
        examples, folders = class_folder(root)
        indices = [self._classes.index(folder, str(root / folder)) for folder in folders]
        return [replace(example, target=indices[example.target]) for example in examples]

    def _texts(self) -> list[Example]:
        found = []
        for where, row in open_table(self.setting.place).rows():
            text, label = text_cell(row, _TEXT, where), cell(row, _LABEL, where)
            target = self._classes.index(label, where)
            found.append((len(text.split()), Example(where, "text", text_loader(text), target)))
        # By length, so that more of them share a batch without padding.
        return [example for _, example in sorted(found, key=lambda item: item[0])]

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[Any]:
        """Rank of the right class and the largest logit, which is not finite where any is not, ``(2,)`` each."""
        output = run(model, inputs)
        logits = (output if isinstance(output, Tensor) else output.logits).float().cpu().numpy()
        return [
            np.array([rank_of(row, example.target), np.abs(row).max()])
            for row, example in zip(logits, examples, strict=True)
        ]

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """Rank of the right class for every sample, ``(N,)``."""
        return np.stack(predictions)[:, 0]

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Share of samples whose class is first; among the first five, where there are more than five."""
        return accuracies(np.asarray(records), len(self._classes))
