"""Embeddings of images and texts by a model with two towers: what retrieval, zero-shot and compositional share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from latte_convert.data.examples import Example, text_loader
from latte_convert.data.feed import Inputs, run
from latte_convert.evaluation.tasks.base import Task

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint


class TwoTowerTask(Task):
    """Embeds every image and every text once; a task compares them in ``records``."""

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must have an image tower and a text tower with a space in common."""
        if set(source.modalities) != {"image", "text"}:
            return f"it takes {' and '.join(source.modalities)}, not images and texts"
        if source.library == "transformers":
            import transformers

            # A model whose class comes with the checkpoint is found out when it runs.
            cls = getattr(transformers, source.model_class, None)
            if cls is not None and not hasattr(cls, "get_text_features"):
                return "it has no embedding of texts beside that of images"
        return None

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[Any]:
        """Embeddings of length 1, ``(D,)`` each."""
        output = run(model, inputs)
        vectors: Tensor = output if isinstance(output, Tensor) else output.pooler_output
        vectors = vectors.float()
        return list((vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)).cpu().numpy())


def text_examples(texts: dict[str, str]) -> list[Example]:
    """An example for every text, whose target is the text; similar lengths side by side, to share a batch.

    Args:
        texts: Where each text stands.
    """
    ordered = sorted(texts.items(), key=lambda item: len(item[0].split()))
    return [Example(where, "text", text_loader(text), text) for text, where in ordered]


def embeddings(examples: Sequence[Example], predictions: Sequence[Any], modality: str) -> dict[Any, Any]:
    """Embedding of every target of one modality, in the order of the examples."""
    pairs = zip(examples, predictions, strict=True)
    return {example.target: vector for example, vector in pairs if example.modality == modality}


def stack(vectors: dict[Any, Any], keys: Sequence[Any]) -> Any:
    """Embeddings of these targets, ``(N, D)``."""
    return np.stack([vectors[key] for key in keys])
