"""Which parts of a model can be exported, under which names: the whole of it, or one tower."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert.data.samples import Modality, Sample
from latte_convert.errors import CheckpointError, UsageError
from latte_convert.exporting.inputs import Images, Inputs, Sound, Texts, Together
from latte_convert.exporting.subject import Subject

logger = logging.getLogger("latte_convert")

_MODALITIES: dict[str, Modality] = {"vision": "image", "text": "text"}
_EMBEDS = {"vision": "image_embeds", "text": "text_embeds"}
_OPEN_CLIP = ("image_embeds", "text_embeds", "logit_scale")


class Part(nn.Module):
    """A model, or one tower of it, as a function of named tensors that returns a tuple of tensors.

    Attributes:
        tower: ``vision``, ``text``, ``encoder`` or ``decoder``; empty for the whole model.
        model: The model it is of.
        inputs: What it takes.
        outputs: Names of what it returns.
    """

    def __init__(self, tower: str, model: nn.Module, inputs: Inputs, call: Call) -> None:
        super().__init__()
        self.tower, self.inputs = tower, inputs
        self.model = model
        with torch.no_grad():
            self.outputs = tuple(call(model, inputs.make(2, inputs.sizes()[0])))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in inputs.example])

        def forward(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
            """The outputs, in the order of ``outputs``."""
            found = call(model, dict(signature.bind(*args, **kwargs).arguments))
            return tuple(found[name] for name in self.outputs)

        forward.__signature__ = signature  # type: ignore[attr-defined]  # torch.export reads the names of inputs there
        self.forward = forward

    @property
    def stem(self) -> str:
        """Name of its file, as ``optimum`` calls it."""
        return f"{self.tower}_model" if self.tower else "model"


Call = Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]
"""From a model and its inputs by name to its outputs by name."""


def tower_names(subject: Subject) -> tuple[str, ...]:
    """The towers that a model can be exported in; none where it has but one."""
    if len(subject.source.modalities) > 1:
        return tuple(name for name, kind in _MODALITIES.items() if kind in subject.source.modalities)
    if not _is_encoder_decoder(subject.model):
        return ()
    return ("encoder", "decoder") if subject.source.modalities[0] == "audio" else ("encoder",)


@dataclass(frozen=True)
class Size:
    """What the user fixes.

    Attributes:
        images: Whether images have the subject's resolution; otherwise any, where model and kernels hold it.
        tokens: Tokens of every text; None: any number.
    """

    images: bool = False
    tokens: int | None = None


def make_parts(subject: Subject, towers: list[str], size: Size) -> list[Part]:
    """The parts that were asked for.

    Args:
        subject: The opened model.
        towers: Names of towers; empty for the whole model.
        size: What is fixed.

    Raises:
        UsageError: There is no such tower; or kernels in it want texts of a fixed number of tokens.
        CheckpointError: The checkpoint does not say how its inputs are prepared.
    """
    known = tower_names(subject)
    for tower in towers:
        if tower not in known:
            has = f"has the towers {' and '.join(known)}" if known else "has no towers: leave out --tower"
            raise UsageError(f"there is no tower '{tower}' in {subject.name}: it {has}.")
    if not towers and known == ("encoder", "decoder"):  # a decoder alone is called again for every token
        towers = list(known)
    return [_part(subject, tower, size) for tower in towers or [""]]


def _part(subject: Subject, tower: str, size: Size) -> Part:
    source, model = subject.source, subject.model
    if len(source.modalities) > 1:
        chosen = [_MODALITIES[tower]] if tower else list(source.modalities)
        made = [_inputs(subject, modality, size) for modality in chosen]
        for each, modality in zip(made, chosen, strict=True):
            each.batch = "batch_size" if tower else f"{modality}_batch_size"
        inputs = made[0] if tower else Together(made)
        method = source.processor(chosen[0]).method(model) if tower else "forward"
        return Part(tower, model, inputs, _named(method, inputs, _EMBEDS.get(tower)))
    inputs = _inputs(subject, source.modalities[0], size)
    if tower:
        inputs.example = {name: v for name, v in inputs.example.items() if not name.startswith("decoder_")}
        encoder = Part("encoder", model, inputs, _encode)
        return encoder if tower == "encoder" else _decoder(subject, encoder, size)
    return Part(tower, model, inputs, _named("forward", inputs, None))


def _encode(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"last_hidden_state": model.get_encoder()(**tensors).last_hidden_state}


def _decode(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.modeling_outputs import BaseModelOutput

    states: Any = BaseModelOutput(last_hidden_state=tensors["encoder_hidden_states"])
    output = model(decoder_input_ids=tensors["input_ids"], encoder_outputs=states, use_cache=False)
    name = "logits" if "logits" in output else "last_hidden_state"
    return {name: output[name]}


def _decoder(subject: Subject, encoder: Part, size: Size) -> Part:
    """A decoder behind the states of its encoder: all tokens so far in, without a cache."""
    config: Any = subject.model.config
    with torch.no_grad():
        (states,) = encoder(**encoder.inputs.make(1, encoder.inputs.sizes()[0]))
    longest = int(getattr(config, "max_target_positions", None) or 64)
    ids = torch.full((1, min(16, longest)), int(config.decoder_start_token_id or 0))
    texts = _texts(subject, {"input_ids": ids}, {}, 0, size, _held(subject, {"decoder"}))
    texts.longest = longest
    inputs = Together([texts, Sound({"encoder_hidden_states": states})])
    return Part("decoder", subject.model, inputs, _decode)


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(model, "get_encoder")


def _named(method: str, inputs: Inputs, embeds: str | None) -> Call:
    """A call of a method; of one tower of two, the pooled and projected output is the embedding of its modality."""

    def call(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        output = getattr(model, method)(**tensors, **inputs.constants)
        if isinstance(output, Tensor):
            output = {embeds or "logits": output}
        if isinstance(output, tuple | list):
            output = dict(zip(_OPEN_CLIP, output, strict=False))
        found = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        if embeds and embeds not in found:
            found = {embeds if name == "pooler_output" else name: value for name, value in found.items()}
        return found

    return call


def _inputs(subject: Subject, modality: Modality, size: Size) -> Inputs:
    source, model = subject.source, subject.model
    processor = source.processor_at(modality, subject.resolution)
    batch = processor.prepare(_sample(modality, processor.sampling_rate), model)
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in batch.items() if not isinstance(value, Tensor)}
    towers = processor.towers(model)
    held = _held(subject, towers)
    if modality == "text":
        return _texts(subject, tensors, constants, getattr(processor.apply, "pad_token_id", None) or 0, size, held)
    if modality == "audio":
        return Sound(tensors, constants)
    found = [(name, value) for name, value in tensors.items() if value.dim() == 4]
    if not found:
        shapes = " and ".join(f"{name} of shape {tuple(value.shape)}" for name, value in tensors.items())
        raise CheckpointError(
            f"{subject.name} cannot be exported: it takes no images, but what is cut from them: {shapes}."
        )
    name, pixels = found[0]
    method = getattr(model, processor.method(model))
    free = not size.images and _any_size(subject)
    if free and held is not None:
        height, width = pixels.shape[2:]
        logger.warning("images have %d x %d px: %s. --resolution exports another size", height, width, held.reason)
        free = False
    if free and "interpolate_pos_encoding" in inspect.signature(method).parameters:
        constants["interpolate_pos_encoding"] = True
    return Images({name: pixels}, constants, open=free, patch=_patch(model))


def _texts(
    subject: Subject, tensors: dict[str, Tensor], constants: dict[str, Any], pad: int, size: Size, held: Held | None
) -> Texts:
    longest = next(iter(tensors.values())).shape[1]
    if size.tokens is None:
        if held is not None:
            raise UsageError(f"{held.reason}: fix the number of tokens of every text with --tokens, up to {longest}.")
        free = subject.source.library != "open_clip"  # its masks have one length, to which its tokenizer fills texts up
        return Texts(tensors, constants, open=free, pad=pad, longest=longest)
    if not 4 <= size.tokens <= longest:
        raise UsageError(f"--tokens {size.tokens} does not fit {subject.name}: give 4 to {longest}.")
    cut = {name: torch.cat([v[:, : size.tokens - 1], v[:, -1:]], 1) for name, v in tensors.items()}
    if held is not None and held.whole and cut.pop("attention_mask", None) is not None:
        logger.warning(
            "every text has %d tokens and no padding, so that there is no attention_mask: %s", size.tokens, held.reason
        )
    return Texts(cut, constants, pad=pad, longest=longest)


@dataclass(frozen=True)
class Held:
    """Why a part works for one number of tokens only.

    Attributes:
        reason: A clause.
        whole: Whether padding cannot stand for fewer tokens either.
    """

    reason: str
    whole: bool


def _held(subject: Subject, towers: set[str] | None) -> Held | None:
    reached = [k for name, k in subject.kernels.items() if towers is None or subject.towers[name] in towers]
    grouping = sorted({kernel.name for kernel in reached if kernel.mixes_queries})
    if subject.merging if towers is None else subject.merging & towers:
        grouping.append("merging")
    if grouping:
        return Held(f"{' and '.join(grouping)} groups the tokens of an input by how many there are", whole=True)
    if reached and subject.min_tokens:
        return Held(f"with fewer than {subject.min_tokens} tokens its layers run exact attention", whole=False)
    return None


def _any_size(subject: Subject) -> bool:
    """Whether the original takes images of any size."""
    return subject.source.library == "transformers" or bool(getattr(subject.model, "dynamic_img_size", False))


def _patch(model: nn.Module) -> int:
    """Pixels of a patch along a side, of the first convolution that cuts an image into patches; else 32."""
    patches = (m.stride[0] for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == m.kernel_size)
    return next((int(side) for side in patches if int(side) > 1), 32)


def _sample(modality: Modality, rate: int | None) -> Sample:
    """A text of more words than any model takes, a grey image, or half a minute of noise."""
    import numpy as np

    value: Any = " ".join(["the man is playing with a dog on the lawn"] * 1000)
    if modality == "image":
        from PIL import Image

        noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        value = Image.fromarray(noise).resize((512, 512), Image.Resampling.BICUBIC)
    if modality == "audio":
        value = np.random.default_rng(0).normal(0, 0.1, 30 * (rate or 16000)).astype(np.float32)
    return Sample("synthetic", "", value)
