"""What goes into an exported graph: names, axes that stay open, and made-up inputs to trace and check it with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]
"""Height and width of images, tokens of a text, or steps of a waveform."""
MOST_SAMPLES = 1 << 16
MOST_PIXELS = 1 << 14
"""Largest side of an image."""
_SEED = 20261130


@dataclass
class Inputs(ABC):
    """The inputs of one modality.

    Attributes:
        example: What the checkpoint's own processor makes of one sample: tensors of batch size 1, by name.
        constants: Other arguments that the model is called with; they become part of the graph.
        open: Whether the size is left open; otherwise it is that of the example.
        batch: What the first axis is called.
    """

    example: dict[str, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)
    open: bool = False
    batch: str = "batch_size"

    @abstractmethod
    def sizes(self) -> list[Shape]:
        """Sizes to check at: the example's own, and another one where the size is open."""

    @abstractmethod
    def axes(self) -> dict[str, dict[int, Any]]:
        """By input: the axes that stay open, each as ``torch.export`` takes it."""

    @abstractmethod
    def axis_names(self) -> dict[str, dict[int, str]]:
        """By input: what these axes are called in the file."""

    def _batch(self) -> Any:
        return torch.export.Dim(self.batch, min=1, max=MOST_SAMPLES)

    @abstractmethod
    def make(self, batch: int, size: Shape) -> dict[str, Tensor]:
        """Inputs of a batch size and a size, always the same; texts of a batch have different lengths."""


@dataclass
class Images(Inputs):
    """Images ``(B, channels, height, width)``; sides are multiples of the patch."""

    patch: int = 1

    @property
    def _name(self) -> str:
        return next(iter(self.example))

    def sizes(self) -> list[Shape]:
        """The example's, and one that is not square."""
        height, width = self.example[self._name].shape[2:]
        if not self.open:
            return [(height, width)]
        tall, wide = self._near(height * 3 / 4), self._near(width / 2)
        return [(height, width), (tall + self.patch if tall == wide else tall, wide)]

    def _near(self, side: float) -> int:
        return max(2, round(side / self.patch)) * self.patch

    def axes(self) -> dict[str, dict[int, Any]]:
        """Whole patches."""
        if not self.open:
            return {self._name: {0: self._batch()}}
        most = MOST_PIXELS // self.patch
        rows, columns = (torch.export.Dim(name, min=2, max=most) for name in ("rows", "columns"))
        return {self._name: {0: self._batch(), 2: self.patch * rows, 3: self.patch * columns}}

    def axis_names(self) -> dict[str, dict[int, str]]:
        """As ``optimum`` writes them."""
        return {self._name: {0: self.batch, 2: "height", 3: "width"}}

    def make(self, batch: int, size: Shape) -> dict[str, Tensor]:
        """Smooth noise in the range of the example."""
        example = self.example[self._name]
        coarse = torch.randn(batch, example.shape[1], 12, 12, generator=torch.Generator().manual_seed(_SEED))
        smooth = F.interpolate(coarse, size, mode="bicubic")
        return {self._name: example.mean() + smooth * example.std()}


@dataclass
class Texts(Inputs):
    """Token ids and what goes with them, ``(B, tokens)``; the last token of the example closes a text."""

    pad: int = 0
    longest: int = 512

    def sizes(self) -> list[Shape]:
        """The example's, and a shorter one."""
        length = next(iter(self.example.values())).shape[1]
        return [(length,), (max(4, length // 2),)] if self.open else [(length,)]

    def axes(self) -> dict[str, dict[int, Any]]:
        """The number of tokens, the same for all."""
        if not self.open:
            return {name: {0: self._batch()} for name in self.example}
        tokens = torch.export.Dim("sequence_length", min=4, max=self.longest)
        return {name: {0: self._batch(), 1: tokens} for name in self.example}

    def axis_names(self) -> dict[str, dict[int, str]]:
        """As ``optimum`` writes them."""
        return {name: {0: self.batch, 1: "sequence_length"} for name in self.example}

    def make(self, batch: int, size: Shape) -> dict[str, Tensor]:
        """Each text of a batch a quarter shorter than the one before, if there is a mask to say so."""
        rows = [self._row(size[0], size[0] - row * (size[0] // 4) * self._masked, row) for row in range(batch)]
        return {name: torch.cat([row[name] for row in rows]) for name in self.example}

    @property
    def _masked(self) -> bool:
        return "attention_mask" in self.example

    def _row(self, length: int, own: int, turn: int) -> dict[str, Tensor]:
        """One text of ``own`` tokens, filled up to ``length``."""
        filling = {"input_ids": self.pad}
        row = {}
        for name, value in self.example.items():
            inner = value[:, 1:-1].roll(turn * 3, dims=1)[:, : own - 2]
            cut = torch.cat([value[:, :1], inner, value[:, -1:]], dim=1)
            row[name] = F.pad(cut, (0, length - own), value=filling.get(name, 0))
        return row


class Sound(Inputs):
    """Waveforms or spectrograms, the length that their feature extractor makes."""

    def sizes(self) -> list[Shape]:
        """The example's own."""
        return [tuple(next(iter(self.example.values())).shape[1:])]

    def axes(self) -> dict[str, dict[int, Any]]:
        """None but the batch."""
        return {name: {0: self._batch()} for name in self.example}

    def axis_names(self) -> dict[str, dict[int, str]]:
        """As ``optimum`` writes them."""
        return {name: {0: self.batch} for name in self.example}

    def make(self, batch: int, size: Shape) -> dict[str, Tensor]:
        """The example with noise in its own range."""
        generator = torch.Generator().manual_seed(_SEED)
        made = {}
        for name, value in self.example.items():
            rows = value.repeat_interleave(batch, dim=0)
            if value.is_floating_point():
                rows = rows + value.std() * torch.randn(rows.shape, generator=generator)
            made[name] = rows
        return made


class Together(Inputs):
    """The inputs of several modalities at once: images and texts of a model with two towers."""

    def __init__(self, parts: list[Inputs]) -> None:
        super().__init__(
            {name: value for part in parts for name, value in part.example.items()},
            {name: value for part in parts for name, value in part.constants.items()},
        )
        self.parts = parts

    def sizes(self) -> list[Shape]:
        """Both at their first size, then both at their last."""
        sizes = [part.sizes() for part in self.parts]
        pairs = [sum((each[i] for each in sizes), ()) for i in (0, -1)]
        return list(dict.fromkeys(pairs))

    def axes(self) -> dict[str, dict[int, Any]]:
        """Those of all."""
        return {name: axes for part in self.parts for name, axes in part.axes().items()}

    def axis_names(self) -> dict[str, dict[int, str]]:
        """Those of all."""
        return {name: axes for part in self.parts for name, axes in part.axis_names().items()}

    def make(self, batch: int, size: Shape) -> dict[str, Tensor]:
        """Inputs of all."""
        made: dict[str, Tensor] = {}
        for part in self.parts:
            own, size = size[: len(part.sizes()[0])], size[len(part.sizes()[0]) :]
            made |= part.make(batch, own)
        return made
