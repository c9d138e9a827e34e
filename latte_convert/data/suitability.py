"""What can be seen of inputs before anything is fitted to them: whether they look like what a model was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from torch import Tensor

_NOISE = 0.5
"""Correlation of neighbouring pixels below which images are noise: photographs have 0.9 and more."""
_FLAT, _FAR, _WIDE = 0.05, 3.0, 4.0
_SILENT = 1e-4
_UNKNOWN = 0.3


class Suitability:
    """Statistics of a model's inputs, one sample at a time.

    Args:
        unknown: Id of the token that stands for words the tokenizer does not know, or None.
    """

    def __init__(self, unknown: int | None = None) -> None:
        self._unknown = unknown
        self._pixels: list[tuple[float, float, float]] = []
        self._loudness: list[float] = []
        self._tokens: list[float] = []

    def add(self, kwargs: dict[str, Any]) -> None:
        """Look at the keyword arguments of one call."""
        for name, value in kwargs.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() in (4, 5) and value.shape[-3] in (1, 3) and value.shape[-1] > 1 and "mask" not in name:
                self._pixels.append(_pixels(value.float()))
            elif name == "input_values" and value.is_floating_point():
                self._loudness.append(float(value.float().square().mean().sqrt()))
            elif name in ("input_ids", "text") and self._unknown is not None:
                self._tokens.append(float((value == self._unknown).float().mean()))

    def warnings(self) -> Iterator[str]:
        """What is odd about most samples, and what to do."""
        if self._pixels:
            yield from self._odd_pixels()
        if self._loudness and median(self._loudness) < _SILENT:
            yield "most of the audio is silent: calibrate on recordings like those you deploy on."
        if self._tokens and median(self._tokens) > _UNKNOWN:
            yield (
                f"{median(self._tokens):.0%} of the tokens are unknown to the tokenizer: calibrate on text in the "
                "language of the model."
            )

    def _odd_pixels(self) -> Iterator[str]:
        mean, spread, neighbours = (median(column) for column in zip(*self._pixels, strict=True))
        found = f"mean {mean:.3g}, standard deviation {spread:.3g}"
        if abs(mean) > _FAR or spread > _WIDE:
            yield (
                f"the images are not normalised as image models expect, to about mean 0 and standard deviation 1: "
                f"{found}. Apply the model's own preprocessing."
            )
        elif spread < _FLAT:
            yield f"most images are of one colour ({found}): calibrate on images like those you deploy on."
        elif neighbours < _NOISE:
            yield (
                f"the images look like noise: neighbouring pixels have a correlation of {neighbours:.2f}, those of "
                "photographs 0.9 and more. Every figure holds for such images alone; calibrate on those you deploy on."
            )


def _pixels(images: Tensor) -> tuple[float, float, float]:
    """Mean, standard deviation, and correlation of pixels with their right neighbours."""
    left, right = (part - part.mean() for part in (images[..., :-1], images[..., 1:]))
    scale = (left.square().sum() * right.square().sum()).sqrt().clamp_min(1e-12)
    return float(images.mean()), float(images.std()), float((left * right).sum() / scale)
