"""From samples to model inputs, with the checkpoint's own processor, tokenizer or feature extractor."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from latte_convert.checkpoints.quiet import quiet_transformers
from latte_convert.checkpoints.remote_code import ADVICE, remote_code, wants_code
from latte_convert.data.decode import BadSample
from latte_convert.data.feed import anchor, place
from latte_convert.data.pixels import pixels_by_size
from latte_convert.data.processor import Batch, Processor
from latte_convert.errors import CheckpointError, DataError, first_line

if TYPE_CHECKING:
    from latte_convert.data.samples import Modality, Sample

DECODER_TOKENS = 64
"""Longest transcript a speech decoder writes for its own calibration."""

_TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.spm", "tekken.json", "tokenizer.py", "*.tiktoken")
_TOWERS = {"image": "vision", "text": "text"}
_METHODS: dict[Modality, str] = {"image": "get_image_features", "text": "get_text_features"}


def modalities(cls: Any) -> tuple[Modality, ...]:
    """What kinds of samples a model class takes, the main one first.

    Raises:
        CheckpointError: It takes videos, which are not read here.
    """
    main: dict[str, Modality] = {"pixel_values": "image", "input_ids": "text"}
    if _has_towers(cls):  # a vision-language model gives no features of texts
        return tuple(kind for kind, method in _METHODS.items() if hasattr(cls, method))
    name = _as_tuple(cls.main_input_name)[0]
    if name == "pixel_values_videos":
        raise CheckpointError(
            f"{cls.__name__} takes videos, and this version reads images, texts and speech: load the model and give "
            "ready batches, latte_convert.convert(model, batches)."
        )
    return (main.get(name, "audio"),)


def _has_towers(cls: Any) -> bool:
    """Whether samples of one kind go to a tower of the model each, and not to all of it."""
    taken = _as_tuple(getattr(cls, "input_modalities", ()))
    return {"image", "text"} <= set(taken) and hasattr(cls, _METHODS["image"])


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


class HFProcessor(Processor):
    """A Transformers checkpoint's own preprocessing for one modality.

    Args:
        identifier: What the user called the checkpoint, for messages.
        path: Its directory.
        modality: What the samples are.
        resolution: Height and width of images, instead of the checkpoint's own.
        trust_remote_code: Whether Python code of the checkpoint may run.

    Raises:
        CheckpointError: The checkpoint does not say how its inputs are prepared.
    """

    def __init__(
        self,
        identifier: str,
        path: Path,
        modality: Modality,
        resolution: int | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        import transformers

        loaders: dict[str, Any] = {
            "image": transformers.AutoImageProcessor,
            "text": transformers.AutoTokenizer,
            "audio": transformers.AutoFeatureExtractor,
        }
        super().__init__()
        self.modality = modality
        self._transcripts: dict[str, Tensor] = {}
        try:
            if modality == "text" and not any(any(path.glob(name)) for name in _TOKENIZER_FILES):
                # Transformers would make an empty tokenizer that maps every word to "unknown".
                raise OSError("no vocabulary file")
            with quiet_transformers(), remote_code(trust_remote_code):
                self.apply = loaders[modality].from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # configuration files can be wrong in many ways
            if wants_code(error):
                raise CheckpointError(f"{identifier}: its {self.word} comes as Python code: {ADVICE}.") from None
            files = "tokenizer.json or vocab files" if modality == "text" else "preprocessor_config.json"
            raise CheckpointError(
                f"{identifier} has no usable {self.word}, and guessing its preprocessing would be wrong: add "
                f"its {files} ({first_line(error)})."
            ) from None
        self.sampling_rate: int | None = getattr(self.apply, "sampling_rate", None)
        self._sizes = {} if resolution is None else self._scaled(identifier, resolution)

    def _scaled(self, identifier: str, resolution: int) -> dict[str, dict[str, int]]:
        try:
            return _sizes(self.apply, resolution)
        except Exception as error:  # sizes of any type
            raise CheckpointError(
                f"{identifier}: the sizes in its preprocessor_config.json cannot be scaled to another resolution: "
                f"{error!r}"
            ) from None

    def method(self, model: nn.Module) -> str:
        """The model's forward, or the features of one tower of a model with several."""
        return _METHODS[self.modality] if _has_towers(type(model)) else "forward"

    def towers(self, model: nn.Module) -> set[str] | None:
        """One tower of a model with several; else all of it."""
        return {_TOWERS[self.modality]} if _has_towers(type(model)) else None

    def pixels(self, width: int, height: int) -> float:
        """Pixels of an image once it is resized."""
        if not getattr(self.apply, "do_resize", True):
            return width * height
        size = self._sizes.get("size") or getattr(self.apply, "size", None) or {}
        return pixels_by_size(dict(size), width, height)

    def _prepare(self, sample: Sample, model: nn.Module) -> Batch:
        prepare = {"image": self._image, "text": self._text, "audio": self._audio}[self.modality]
        taken = signature(getattr(model, self.method(model))).parameters
        return {key: value for key, value in prepare(sample, model).items() if key in taken}

    def _image(self, sample: Sample, model: nn.Module) -> Batch:
        batch = dict(self.apply(images=sample.value, return_tensors="pt", **self._sizes))
        return {**batch, "interpolate_pos_encoding": True} if self._sizes else batch

    def _text(self, sample: Sample, model: nn.Module) -> Batch:
        longest, text = longest_text(model, self.apply), self.text_of(sample)
        # SigLIP was trained on texts that are filled up and without a mask, and reads its last position.
        filled = str(getattr(model.config, "model_type", "")).startswith("siglip")
        fill: dict[str, Any] = {"padding": "max_length", "max_length": longest} if filled else {}
        batch = dict(self.apply(text, return_tensors="pt", verbose=False, **fill))
        if batch["input_ids"].shape[1] > longest:
            self.truncated.add(sample.id)
            batch = dict(self.apply(text, return_tensors="pt", truncation=True, max_length=longest))
        if filled:
            batch.pop("attention_mask", None)
        _check_known(batch["input_ids"], model)
        if getattr(model.config, "is_encoder_decoder", False):
            # Teacher forcing on the text itself: the decoder's own language, without labels.
            batch["decoder_input_ids"] = batch["input_ids"]
        return batch

    def _audio(self, sample: Sample, model: Any) -> Batch:
        batch = dict(self.apply(sample.value, sampling_rate=self.sampling_rate, return_tensors="pt"))
        limit = getattr(self.apply, "n_samples", None)
        if limit is not None and isinstance(sample.value, np.ndarray) and len(sample.value) > limit:
            self.truncated.add(sample.id)
        if getattr(model.config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = self._transcript(sample, batch, model)
        return batch

    @torch.no_grad()
    def _transcript(self, sample: Sample, batch: Batch, model: Any) -> Tensor:
        """The original model's own transcript: what its decoder sees in use, without labels."""
        if sample.id not in self._transcripts:
            features = place(next(iter(batch.values())), anchor(model))
            if model.can_generate():
                most = min(DECODER_TOKENS, int(getattr(model.config, "max_target_positions", None) or 1 << 30) // 2)
                with quiet_transformers():
                    tokens = model.generate(features, max_new_tokens=most, do_sample=False)
            else:
                tokens = torch.tensor([[model.config.decoder_start_token_id]])
            self._transcripts[sample.id] = tokens.cpu()
        return self._transcripts[sample.id]


def _check_known(ids: Tensor, model: Any) -> None:
    """Refuse tokens that the model has no embedding for; on a GPU they would end the process."""
    known = getattr(getattr(model.config, "text_config", model.config), "vocab_size", None)
    if isinstance(known, int) and int(ids.max()) >= known:
        raise BadSample(f"the tokenizer gives it token {int(ids.max())}, and the model knows {known}")


def _sizes(processor: Any, resolution: int) -> dict[str, dict[str, int]]:
    """An image processor's own resize and crop, scaled so that images come out at ``resolution``."""
    size = {key: value for key, value in dict(processor.size).items() if value}
    crops = bool(getattr(processor, "do_center_crop", False))
    own = dict(processor.crop_size)["height"] if crops else next(iter(size.values()))
    sizes = {"size": {key: round(value * resolution / own) for key, value in size.items()}}
    return {**sizes, "crop_size": {"height": resolution, "width": resolution}} if crops else sizes


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
