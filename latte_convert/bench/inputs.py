"""What a benchmark runs on: inputs of each length that was asked for, made by the checkpoint's own processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import Merge
from latte_convert.data.feed import Inputs, place
from latte_convert.data.processor import Batch
from latte_convert.data.samples import Sample
from latte_convert.errors import DataError, UsageError

if TYPE_CHECKING:
    from latte_convert.artifact.load import Artifact
    from latte_convert.data.processor import Processor
    from latte_convert.data.samples import Modality

SAMPLES = 4
"""Most samples of ``--data`` that fidelity is measured on."""
MOST_TOKENS = 1_000_000
"""Longest text: the words for it are made before the model says what it takes."""
SECONDS = 30
"""Length of the waveform that models of audio get."""
_SCALES = (0.5, 0.75, 1.0, 1.25)
_SHARES = (8, 4, 2, 1)
_SEED = 20261130


@dataclass
class Case:
    """One length: a model that takes it, and inputs.

    Attributes:
        label: As the user knows it.
        resolution: Height and width of images in pixels, or None.
        host: The original, on its device.
        inputs: At least one; the first is the one that is timed.
        merges: The blocks whose tokens the hybrid merges.
    """

    label: str
    resolution: int | None
    host: Host
    inputs: list[Inputs]
    merges: Mapping[str, Merge] = field(default_factory=dict)


class CaseMaker:
    """Makes the cases of one artifact.

    Args:
        artifact: The artifact, its model not converted.
        modality: What the model is given.
        data: Real samples, which take the place of synthetic ones.

    Raises:
        DataError: ``data`` has no usable sample.
    """

    def __init__(self, artifact: Artifact, modality: Modality, data: str | None = None) -> None:
        self.artifact = artifact
        self.modality = modality
        self.samples = [_synthetic(modality)] if data is None else self._read(data)

    def _read(self, data: str) -> list[Sample]:
        from latte_convert.data.samples import open_samples

        processor = self.artifact.source.processor(self.modality)
        found = open_samples(data, self.modality, samples=SAMPLES, sampling_rate=processor.sampling_rate)
        return list(found.tried(lambda sample: processor.prepare(sample, self.artifact.model)))

    def images(self, resolutions: Sequence[int]) -> list[Case]:
        """One case a resolution; by default a half, three quarters, all and five quarters of the artifact's own.

        Raises:
            CheckpointError: The model does not run at one of them.
        """
        return [self.image(resolution) for resolution in resolutions or self._own_resolutions()]

    def image(self, resolution: int) -> Case:
        """Images of one height and width in pixels."""
        artifact = self.artifact
        processor = artifact.source.processor_at("image", resolution)
        model = artifact.model
        if artifact.source.library != "transformers":  # these are built for one size
            like = next(model.parameters())
            model, _ = artifact.source.instantiate(artifact.source.original_tensors(), resolution)
            model = model.to(like.device, like.dtype)
        batches = [processor.prepare(sample, model) for sample in self.samples]
        return self._case(f"{resolution} px", resolution, model, processor, batches)

    def _own_resolutions(self) -> list[int]:
        """Multiples of the artifact's own resolution, rounded to whole patches."""
        source, model = self.artifact.source, self.artifact.model
        recorded = self.artifact.manifest.recipe.get("resolution")
        own = recorded or _height(source.processor("image").prepare(self.samples[0], model))
        patch = next(
            (m.stride[0] for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == m.kernel_size), 32
        )
        return sorted({max(1, round(own * scale / patch)) * patch for scale in _SCALES})

    def texts(self, tokens: Sequence[int]) -> list[Case]:
        """One case a number of tokens; by default an eighth, a quarter, a half and all of what the model takes.

        Raises:
            DataError: A number is more than the model takes, or fewer than its special tokens.
        """
        processor = self.artifact.source.processor("text")
        model = self.artifact.model
        asked = max(tokens, default=512)
        words = " ".join(str(sample.value) for sample in self.samples).split()
        text = " ".join(words * (asked // len(words) + 2))  # a word is at least one token
        batches = [processor.prepare(Sample("joined", "", text), model)]
        longest = _width(batches[0])
        for number in tokens:
            if number > longest:
                raise DataError(f"{number} tokens are more than the model takes: its maximum is {longest}.")
            if number < 3:
                raise DataError(f"{number} tokens leave no room between the special ones; give at least 3.")
        lengths = tokens or sorted({max(3, longest // share) for share in _SHARES})
        return [
            self._case(f"{number} tokens", None, model, processor, [_cut(batch, number) for batch in batches])
            for number in lengths
        ]

    def audio(self) -> list[Case]:
        """The one case of a model of audio: its length is that of its feature extractor, or ``SECONDS``."""
        processor = self.artifact.source.processor("audio")
        batches = []
        for sample in self.samples:
            value = sample.value
            if sample.id == "synthetic":
                generator = np.random.default_rng(_SEED)
                value = generator.normal(0, 0.1, SECONDS * (processor.sampling_rate or 16000)).astype(np.float32)
            batches.append(processor.prepare(Sample(sample.id, sample.sha256, value), self.artifact.model))
        return [self._case(f"{SECONDS} s", None, self.artifact.model, processor, batches)]

    def _case(
        self, label: str, resolution: int | None, model: nn.Module, processor: Processor, batches: Sequence[Batch]
    ) -> Case:
        like = next(model.parameters())
        method = processor.method(model)
        towers = processor.towers(model)
        tower = "+".join(sorted(towers)) if towers is not None else ""
        inputs = [Inputs({k: place(v, like) for k, v in batch.items()}, method, tower) for batch in batches]
        return Case(label, resolution, Host.of(model), inputs, self.artifact.merges)


def make_cases(
    artifact: Artifact, tokens: Sequence[int] = (), resolutions: Sequence[int] = (), data: str | None = None
) -> tuple[Modality, list[Case]]:
    """The modality of a benchmark and its cases, shortest first.

    Args:
        artifact: The artifact, its model not converted.
        tokens: Sequence lengths of texts.
        resolutions: Heights and widths of images.
        data: Real samples.

    Raises:
        UsageError: The lengths are not of the kind that the model has, or beyond all bounds.
        CheckpointError: The model does not run at a resolution.
        DataError: The model does not take as many tokens, or ``data`` has no usable sample.
    """
    if max(tokens, default=0) > MOST_TOKENS:
        raise UsageError(f"--tokens takes at most {MOST_TOKENS:,}, not {max(tokens):,}.")
    if tokens and resolutions:
        raise UsageError("--tokens is for texts, --resolutions for images; give one of them.")
    kinds = artifact.source.modalities
    modality: Modality = "text" if tokens else "image" if resolutions else _reached(artifact)
    if modality not in kinds:
        option = "--tokens" if tokens else "--resolutions"
        instead = {"image": "--resolutions", "text": "--tokens", "audio": f"no length: {SECONDS} s of sound are run"}
        raise UsageError(f"{option} does not fit a model of {kinds[0]}; give {instead[kinds[0]]}.")
    maker = CaseMaker(artifact, modality, data)
    if modality == "image":
        return modality, maker.images(sorted(set(resolutions)))
    return modality, maker.texts(sorted(set(tokens))) if modality == "text" else maker.audio()


def _reached(artifact: Artifact) -> Modality:
    """The first modality whose tower holds a converted site."""
    towers = {site.name: site.tower for site in artifact.host.sites()}
    converted = {towers.get(name) for name in artifact.kernels}
    for kind in artifact.source.modalities:
        reached = artifact.source.processor(kind).towers(artifact.model)
        if reached is None or reached & converted:
            return kind
    return artifact.source.modalities[0]


def _synthetic(modality: Modality) -> Sample:
    """A smooth random image, or a few short words; a waveform is made where its rate is known."""
    value: Any = np.zeros(1, np.float32)
    if modality == "text":
        value = "the man is playing with a dog on the lawn"
    if modality == "image":
        from PIL import Image

        coarse = np.random.default_rng(_SEED).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        value = Image.fromarray(coarse).resize((1024, 1024), Image.Resampling.BICUBIC)
    return Sample("synthetic", "", value)


def _height(batch: Batch) -> int:
    return next(int(v.shape[-2]) for v in batch.values() if isinstance(v, Tensor) and v.dim() == 4)


def _width(batch: Batch) -> int:
    return next(int(v.shape[1]) for v in batch.values() if isinstance(v, Tensor) and v.dim() == 2)


def _cut(batch: Batch, tokens: int) -> Batch:
    """A batch of one text shortened to ``tokens``; the last token, which closes it, stays."""
    length = _width(batch)

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != length:
            return value
        return torch.cat([value[:, : tokens - 1], value[:, -1:]], dim=1)

    return {key: cut(value) for key, value in batch.items()}
