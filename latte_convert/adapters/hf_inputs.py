"""From samples to model inputs, with the checkpoint's own processor, tokenizer or feature extractor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from latte_convert.adapters.hf_load import quiet_transformers
from latte_convert.adapters.source import Source
from latte_convert.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from latte_convert.calibration.data import Modality, Sample, SampleSet

DECODER_TOKENS = 64
"""Longest transcript a speech decoder writes for its own calibration."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.spm", "tekken.json", "tokenizer.py", "*.tiktoken")
_WORDS = {"image": "image processor", "text": "tokenizer", "audio": "feature extractor"}


def modalities(cls: Any) -> tuple[Modality, ...]:
    """What kinds of samples a model class takes, the main one first."""
    main: dict[str, Modality] = {"pixel_values": "image", "input_ids": "text"}
    taken = tuple(m for m in _as_tuple(getattr(cls, "input_modalities", ())) if m in ("image", "text"))
    if len(taken) > 1 and hasattr(cls, "get_image_features"):
        return ("image", "text")
    return (main.get(cls.main_input_name, "audio"),)


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


class Processor:
    """A checkpoint's own preprocessing for one modality.

    Args:
        source: The checkpoint.
        modality: What the samples are.

    Raises:
        CheckpointError: The checkpoint does not say how its inputs are prepared.
    """

    def __init__(self, source: Source, modality: Modality) -> None:
        import transformers

        loaders: dict[str, Any] = {
            "image": transformers.AutoImageProcessor,
            "text": transformers.AutoTokenizer,
            "audio": transformers.AutoFeatureExtractor,
        }
        self.modality = modality
        try:
            if modality == "text" and not any(any(source.path.glob(name)) for name in _TOKENIZER_FILES):
                # Transformers would make an empty tokenizer that maps every word to "unknown".
                raise OSError("no vocabulary file")
            with quiet_transformers():
                self.apply = loaders[modality].from_pretrained(source.path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            files = "tokenizer.json or vocab files" if modality == "text" else "preprocessor_config.json"
            raise CheckpointError(
                f"{source.id} has no usable {_WORDS[modality]}, and guessing its preprocessing would be wrong: add "
                f"its {files} ({str(error).strip().splitlines()[0]})."
            ) from None
        self.sampling_rate: int | None = getattr(self.apply, "sampling_rate", None)


class SampleFeed:
    """Model inputs of a sample set, one sample at a time, prepared again on every iteration.

    One sample a batch: padding never enters a statistic, and memory does not depend on the number of samples.

    Attributes:
        truncated: Samples that were longer than the model takes.

    Args:
        samples: The samples.
        processor: The checkpoint's preprocessing.
        model: The model, for its device, dtype, longest sequence and decoder.
    """

    def __init__(self, samples: SampleSet, processor: Processor, model: nn.Module) -> None:
        self.samples = samples
        self.processor = processor
        self.truncated: set[str] = set()
        self._model = model
        self._transcripts: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in self.samples:
            yield self._prepare(sample)

    def method(self, model: nn.Module) -> str:
        """The call that takes these samples: the whole model, or one tower of a two-tower model."""
        if len(modalities(type(model))) > 1:
            return {"image": "get_image_features", "text": "get_text_features"}[self.processor.modality]
        return "forward"

    @torch.no_grad()
    def run(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """Run the model on one batch."""
        method = self.method(model)
        return model(**batch) if method == "forward" else getattr(model, method)(**batch)

    def towers(self) -> set[str] | None:
        """The towers that these samples reach, or None where they reach all of the model."""
        if len(modalities(type(self._model))) > 1:
            return {{"image": "vision", "text": "text"}[self.processor.modality]}
        return None

    def _prepare(self, sample: Sample) -> dict[str, Any]:
        batch: dict[str, Any] = {"image": self._image, "text": self._text, "audio": self._audio}[
            self.processor.modality
        ](sample)
        device, dtype = _device_dtype(self._model)
        return {
            key: value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def _image(self, sample: Sample) -> dict[str, Any]:
        return dict(self.processor.apply(images=sample.value, return_tensors="pt"))

    def _text(self, sample: Sample) -> dict[str, Any]:
        longest = longest_text(self._model, self.processor.apply)
        batch = dict(self.processor.apply(sample.value, return_tensors="pt", verbose=False))
        if batch["input_ids"].shape[1] > longest:
            self.truncated.add(sample.id)
            batch = dict(
                self.processor.apply(sample.value, return_tensors="pt", truncation=True, max_length=longest)
            )
        return batch

    def _audio(self, sample: Sample) -> dict[str, Any]:
        rate = self.processor.sampling_rate
        batch = dict(self.processor.apply(sample.value, sampling_rate=rate, return_tensors="pt"))
        limit = getattr(self.processor.apply, "n_samples", None)
        if limit is not None and isinstance(sample.value, np.ndarray) and len(sample.value) > limit:
            self.truncated.add(sample.id)
        if getattr(self._model.config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = self._transcript(sample, batch)
        return batch

    @torch.no_grad()
    def _transcript(self, sample: Sample, batch: dict[str, Any]) -> Tensor:
        """The original model's own transcript: what its decoder sees in use, without labels."""
        model: Any = self._model
        if sample.id not in self._transcripts:
            device, dtype = _device_dtype(self._model)
            features = next(iter(batch.values())).to(device, dtype)
            if hasattr(model, "generate") and model.can_generate():
                with quiet_transformers():
                    tokens = model.generate(features, max_new_tokens=DECODER_TOKENS, do_sample=False)
            else:
                tokens = torch.tensor([[model.config.decoder_start_token_id]])
            self._transcripts[sample.id] = tokens.cpu()
        return self._transcripts[sample.id]


def _device_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameter = next(model.parameters())
    return parameter.device, parameter.dtype


def longest_text(model: nn.Module, tokenizer: Any) -> int:
    """Longest token sequence that a model takes.

    RoBERTa's position table starts behind its padding index, so it holds fewer positions than it has rows.
    """
    config = getattr(model.config, "text_config", model.config)
    limit = min(int(tokenizer.model_max_length), int(getattr(config, "max_position_embeddings", None) or 1 << 30))
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = min(limit, module.num_embeddings - module.padding_idx - 1)
    if limit < 1:
        raise DataError("the model takes no text at all: its longest sequence is 0")
    return limit
