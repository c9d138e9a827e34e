"""Copies of a sample: told by what is seen, heard or read, in whatever format, size or quality it was saved."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from PIL import Image

from latte_convert.data.decode import Value

_SIDE, _BLOCK = 16, 256
_NEAR = 4.0
"""Largest root mean square difference, of 255, between thumbnails of copies; two photographs differ by tens."""


def content(value: Value) -> str:
    """Hex SHA-256 of a decoded sample: the same for the same pixels in PNG, BMP and TIFF."""
    if isinstance(value, str):
        return hashlib.sha256(value.encode()).hexdigest()
    if isinstance(value, Image.Image):
        return hashlib.sha256(f"{value.size}".encode() + value.tobytes()).hexdigest()
    return hashlib.sha256(value.tobytes()).hexdigest()


def look(value: Value) -> bytes:
    """A thumbnail of 256 levels that copies have in common.

    Of an image it is 16 x 16 grey pixels; of a waveform the loudness of 256 parts; of a text a hash of its words, so
    that copies differ in case, spaces and punctuation only.
    """
    if isinstance(value, str):
        words = "".join(c if c.isalnum() else " " for c in value.casefold()).split()
        return hashlib.sha256(" ".join(words or [value]).encode()).digest() * (_BLOCK // 32)
    if isinstance(value, Image.Image):
        return bytes(value.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX).tobytes())
    starts = np.arange(_BLOCK) * len(value) // _BLOCK
    power = np.add.reduceat(value.astype(np.float64) ** 2, starts) / np.diff(starts, append=len(value)).clip(1)
    loudness = np.sqrt(power)
    return bytes((255 * loudness / max(loudness.max(), 1e-12)).astype(np.uint8).tobytes())


def alike(looks: Sequence[bytes]) -> list[list[int]]:
    """Groups of samples of which each is a copy of another in the group; those without a copy stand alone.

    Args:
        looks: Of ``look``, in the order of the samples.

    Returns:
        Indices, in the order of the first of each group.
    """
    levels = np.frombuffer(b"".join(looks), dtype=np.uint8).reshape(len(looks), _BLOCK).astype(np.float32)
    group = list(range(len(looks)))
    for start in range(0, len(looks), _BLOCK):
        for others in _near(levels[start : start + _BLOCK], levels):
            joined = {group[j] for j in others}
            first = min(joined)
            if len(joined) > 1:
                group = [first if each in joined else each for each in group]
    members = sorted(range(len(looks)), key=lambda i: (group[i], i))
    return [list(indices) for _, indices in groupby(members, key=lambda i: group[i])]


def held_out(looks: Sequence[bytes], count: int) -> set[int]:
    """The last ``count`` samples, but with their copies: what is held out was not fitted in another format.

    Where copies would make it more, samples before them are taken; where all are copies, the last ones after all.

    Args:
        looks: Of ``look``, in the order of the samples.
        count: How many to hold out.
    """
    held: set[int] = set()
    for group in sorted(alike(looks), key=lambda group: group[-1], reverse=True):
        if len(held) + len(group) <= count:
            held.update(group)
    return held or set(range(len(looks) - count, len(looks)))


def _near(rows: npt.NDArray[np.float32], levels: npt.NDArray[np.float32]) -> list[npt.NDArray[np.intp]]:
    """For each row the indices of the thumbnails that are no farther from it than copies are."""
    squares = (rows**2).sum(1)[:, None] + (levels**2).sum(1) - 2 * rows @ levels.T
    return [np.flatnonzero(row <= _NEAR**2 * _BLOCK) for row in squares]
