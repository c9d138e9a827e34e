"""A checkpoint's own preprocessing: from a sample to what its model takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import metadata
from typing import TYPE_CHECKING, Any

from PIL import Image

from latte_convert.data.decode import BadSample, Modality
from latte_convert.data.pixels import MOST_PIXELS
from latte_convert.errors import first_line, is_shortage

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.data.samples import Sample

Batch = dict[str, Any]
"""Keyword arguments of a model."""

MOST_CHARACTERS = 1 << 18
"""Of a text that is tokenised: tokenizers take a hundred times the memory of their text, before they cut it."""

_WORDS: dict[Modality, str] = {"image": "image processor", "text": "tokenizer", "audio": "feature extractor"}


class Processor(ABC):
    """A checkpoint's own preprocessing for one modality. One subclass a library.

    Attributes:
        modality: What the samples are.
        apply: The library's own transform, tokenizer or feature extractor.
        sampling_rate: Of the waveforms it takes, in Hz; None where it takes none.
        truncated: Ids of the samples that were longer than the model takes.
    """

    modality: Modality
    apply: Any
    sampling_rate: int | None = None

    def __init__(self) -> None:
        self.truncated: set[str] = set()

    def prepare(self, sample: Sample, model: nn.Module) -> Batch:
        """Turn a sample into the keyword arguments of ``model``, batch size 1, on the CPU.

        Raises:
            BadSample: The library cannot make an input of it.
        """
        try:
            self._check_pixels(sample)
            return self._prepare(sample, model)
        except Exception as error:  # processors fail in many ways on odd settings and odd samples
            if is_shortage(error) or isinstance(error, BadSample):
                raise
            raise BadSample(f"the {self.word} cannot use it: {first_line(error)}") from error

    def _check_pixels(self, sample: Sample) -> None:
        """Refuse an image that the library would resize to more pixels than memory holds."""
        if isinstance(sample.value, Image.Image):
            width, height = sample.value.size
            pixels = self.pixels(width, height)
            if pixels > MOST_PIXELS:
                raise BadSample(
                    f"{width} x {height} pixels: resized for this model it has {pixels:,.0f}, and at most "
                    f"{MOST_PIXELS:,} are computed"
                )

    def pixels(self, width: int, height: int) -> float:
        """Pixels that an image of a width and height has once the library has resized it."""
        return width * height

    @abstractmethod
    def _prepare(self, sample: Sample, model: nn.Module) -> Batch: ...

    @property
    def word(self) -> str:
        """What the library calls such a thing."""
        return _WORDS[self.modality]

    def text_of(self, sample: Sample) -> str:
        """The text of a sample, cut where no model reads on."""
        text = str(sample.value)
        if len(text) > MOST_CHARACTERS:
            self.truncated.add(sample.id)
        return text[:MOST_CHARACTERS]

    def method(self, model: nn.Module) -> str:
        """The method that takes these samples: ``forward``, or that of one tower."""
        return "forward"

    def towers(self, model: nn.Module) -> set[str] | None:
        """The towers that these samples reach, or None where they reach all of the model."""
        return None

    def description(self) -> dict[str, str]:
        """Class, backend and their versions: of two backends one resizes otherwise than the other."""
        library = type(self.apply).__module__.partition(".")[0]
        backend = getattr(self.apply, "backend", None)
        names = [library, *([backend] if isinstance(backend, str) else [])]
        versions = {name: _version(name) for name in names}
        return {
            "class": type(self.apply).__name__,
            **({"backend": backend} if isinstance(backend, str) else {}),
            **{f"{name}_version": version for name, version in versions.items() if version},
        }


def _version(library: str) -> str | None:
    distribution = {"open_clip": "open_clip_torch", "pil": "pillow"}.get(library, library)
    try:
        return metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError):  # a name out of a configuration
        return None
