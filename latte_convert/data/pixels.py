"""How many pixels an image has once it is resized: known from a processor's settings, before memory is taken for it.

Resized by its shorter side, a strip of 8 x 10,000,000 pixels, which a file of a few kilobytes holds, would take a
hundred gigabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_PIXELS = 1 << 26
"""Of an image on its way into a model: 8,192 x 8,192, and 0.8 GB in float32."""

_LONGEST_SIDE = 1 << 14
"""Longer sides in a size of Transformers are numbers of pixels: so Qwen2-VL and its kin name them."""


def pixels_by_size(size: Mapping[str, int], width: int, height: int) -> float:
    """Pixels of an image behind an image processor of Transformers.

    Args:
        size: Its ``size``: a height and a width, or the shortest and the longest edge.
        width: Of the image, in pixels.
        height: Of the image, in pixels.
    """
    if size.get("height") and size.get("width"):
        return float(size["height"]) * float(size["width"])
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    if max(shortest or 0, longest or 0) > _LONGEST_SIDE:
        return max(min(width * height, longest or width * height), shortest or 0)
    scales = [edge / side for edge, side in ((shortest, min(width, height)), (longest, max(width, height))) if edge]
    scale = min(scales, default=1.0)
    return width * height * scale * scale


def pixels_by_transforms(transform: Any, width: int, height: int) -> float:
    """Pixels of an image behind the transforms of torchvision, and those of timm and open_clip in their manner."""
    resizing = (step for step in getattr(transform, "transforms", ()) if "Resize" in type(step).__name__)
    step = next(resizing, None)
    if step is None:
        return width * height
    size: tuple[float, ...] = (step.size,) if isinstance(step.size, int) else tuple(step.size)
    if len(size) == 1:
        scale = size[0] / min(width, height)
        return width * height * scale * scale
    if not hasattr(step, "longest"):
        return size[0] * size[1]
    ratios = (height / size[0], width / size[1])  # ResizeKeepRatio: a mean of fitting in and of filling
    longest = float(step.longest)
    ratio = max(ratios) * longest + min(ratios) * (1 - longest)
    return width * height / ratio / ratio
