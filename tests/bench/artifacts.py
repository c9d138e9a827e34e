"""Artifacts to measure: what a benchmark finds does not depend on how well a kernel was fitted, so two samples do."""

from __future__ import annotations

from pathlib import Path

import latte_convert
from latte_convert.recipe import Recipe

EVERY_SECOND = ("layer.0", "layer.2", "layer.4")
"""Three of the six sites of the tiny DINOv2."""


def make_artifact(checkpoint: Path, samples: Path, out: Path, include: tuple[str, ...] = ()) -> Path:
    """Convert every site that ``include`` names, all without it."""
    recipe = Recipe(kernel="latte", samples=2, holdout=0.5, ratio=1.0, include=include)
    return latte_convert.convert(checkpoint, samples, recipe=recipe).save(out)
