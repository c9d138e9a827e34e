"""Artifacts of small and real models, converted once a session."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from PIL import Image

import latte_convert
from latte_convert.recipe import Recipe

CLASSES = ("cat", "coffee", "rocket")


@pytest.fixture(scope="session")
def subjects(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Crops of three photographs in ``train/CLASS`` (6 each) and ``test/CLASS`` (4 each)."""
    root = tmp_path_factory.mktemp("subjects")
    for name in CLASSES:
        draw = random.Random(name)
        with Image.open(photos / f"{name}.jpg") as photo:
            for number in range(10):
                left, top = draw.randrange(photo.width - 180), draw.randrange(photo.height - 180)
                folder = root / ("train" if number < 6 else "test") / name
                folder.mkdir(parents=True, exist_ok=True)
                photo.crop((left, top, left + 180, top + 180)).save(folder / f"{number}.jpg")
    return root


@pytest.fixture(scope="session")
def dino_artifact(tiny_dino: Path, subjects: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny DINOv2, two of its six sites converted."""
    result = latte_convert.convert(tiny_dino, subjects / "train", recipe=Recipe(kernel="latte", samples=4, k=2))
    return result.save(tmp_path_factory.mktemp("dino") / "hybrid")


@pytest.fixture(scope="session")
def minilm_artifact(models_dir: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MiniLM, three of its six sites converted."""
    result = latte_convert.convert(models_dir / "minilm-l6", sentences, recipe=Recipe(kernel="latte", samples=6, k=3))
    return result.save(tmp_path_factory.mktemp("minilm") / "hybrid")


@pytest.fixture(scope="session")
def whisper_artifact(models_dir: Path, speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Whisper tiny.en, one site converted."""
    recipe = Recipe(kernel="latte", samples=2, holdout=0.5, k=1, include=("decoder.layers.0.self_attn",))
    result = latte_convert.convert(models_dir / "whisper-tiny.en", speech, recipe=recipe)
    return result.save(tmp_path_factory.mktemp("whisper") / "hybrid")
