"""``retrieval``: recall of captions for images and of images for captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from latte_convert.data.captions import PATTERNS, read_captions
from latte_convert.data.choice import choose
from latte_convert.data.examples import Example, file_loader, named_file
from latte_convert.data.label_files import image_folder, label_files, one
from latte_convert.errors import DataError
from latte_convert.evaluation.ranks import ranks
from latte_convert.evaluation.tasks.base import Metric, require_two
from latte_convert.evaluation.two_tower import TwoTowerTask, embeddings, stack, text_examples

_AT = (1, 5, 10)


class RetrievalTask(TwoTowerTask):
    """Recall at 1, 5 and 10 over all images and all captions, as CLIP and SigLIP report it on COCO and Flickr30k.

    ``i2t_r5``: share of images with one of their own captions among the five nearest (text recall). ``t2i_r5``: share
    of captions with their own image among the five nearest (image recall). A tie counts against the model, and the
    bootstrap draws images, each with its captions, of an unchanged gallery.

    Data: a caption file (see ``evaluation.captions``), or the folder of it; with the folder of the images as a second
    place where it does not lie beside. At least 11 images make all six metrics mean something.
    """

    name = "retrieval"
    metrics = tuple(Metric(f"{way}_r{k}") for k in (5, 1, 10) for way in ("i2t", "t2i"))
    note = (
        "i2t is text recall (captions found for images), t2i image recall; the gallery is all images and all captions."
    )

    def open(self) -> list[Example]:
        """Images first, then each different caption once."""
        files, folders = label_files(self.setting.data, PATTERNS)
        found: dict[str, list[Any]] = {}
        for caption in read_captions(one(files)):
            found.setdefault(caption.image, []).append(caption)
        names = choose(list(found), self.setting.samples, self.setting.seed, str)
        require_two(len(names), str(files[0]))
        folder = image_folder(folders, names[0], found[names[0]][0].where)
        paths = {name: named_file(folder, name, "image", found[name][0].where) for name in names}
        self._captions = {name: [caption.text for caption in found[name]] for name in names}
        images = [Example(name, "image", file_loader(path, "image"), name) for name, path in paths.items()]
        return images + text_examples({c.text: c.where for name in reversed(names) for c in reversed(found[name])})

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """A row an image, ``(N, 7)``: found at 1, 5, 10; how many captions; how many of these find it at 1, 5, 10."""
        images, texts = (embeddings(examples, predictions, modality) for modality in ("image", "text"))
        if not images:
            raise DataError(f"{', '.join(self.setting.data)}: no image could be used.")
        captions = {name: self._captions[name] for name in images}  # without those of images that were skipped
        gallery = [text for own in captions.values() for text in own]
        rows: dict[str, list[int]] = {}
        for i, text in enumerate(gallery):
            rows.setdefault(text, []).append(i)
        # A caption that two images share is right for both.
        own_rows = [np.array(sorted({i for text in own for i in rows[text]})) for own in captions.values()]
        owner = np.repeat(np.arange(len(captions)), [len(own) for own in captions.values()])
        image_vectors, text_vectors = stack(images, list(captions)), stack(texts, gallery)
        to_text = ranks(image_vectors, text_vectors, own_rows)
        to_image = ranks(text_vectors, image_vectors, list(owner[:, None]))
        hits = np.stack([np.bincount(owner, to_image < k, len(captions)) for k in _AT], 1)
        found = np.stack([to_text < k for k in _AT], 1)
        return np.concatenate([found, np.bincount(owner)[:, None], hits], 1, dtype=np.float64)

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Recalls, ``i2t`` over images and ``t2i`` over their captions."""
        sums = np.asarray(records).sum(0)
        to_text, to_image = sums[:3] / len(records), sums[4:] / sums[3]
        values = {f"i2t_r{k}": float(v) for k, v in zip(_AT, to_text, strict=True)}
        values |= {f"t2i_r{k}": float(v) for k, v in zip(_AT, to_image, strict=True)}
        return {metric.name: values[metric.name] for metric in self.metrics}
