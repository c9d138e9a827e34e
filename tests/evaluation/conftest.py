"""Artifacts of small and real models, converted once a session."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

import latte_convert
from latte_convert.recipe import Recipe

CLASSES = ("dress", "shoes", "t-shirt")


@pytest.fixture(scope="session")
def clothes(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real photographs in ``train/CLASS`` (6 each) and ``test/CLASS`` (4 each)."""
    root = tmp_path_factory.mktemp("clothes")
    for split, count in (("train", 6), ("test", 4)):
        for name in CLASSES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for path in sorted((shared_data / "clothing" / split / name).iterdir())[:count]:
                shutil.copy(path, folder)
    return root


@pytest.fixture(scope="session")
def pairs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 12 pairs of STS-B's test set, without a header."""
    path = tmp_path_factory.mktemp("sts") / "pairs.csv"
    with (shared_data / "stsb" / "stsb-en-test.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row, _ in zip(csv.reader(file), range(12), strict=False)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture(scope="session")
def dino_artifact(tiny_dino: Path, clothes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny DINOv2, two of its six sites converted."""
    result = latte_convert.convert(tiny_dino, clothes / "train", recipe=Recipe(kernel="latte", samples=4, k=2))
    return result.save(tmp_path_factory.mktemp("dino") / "hybrid")


@pytest.fixture(scope="session")
def minilm_artifact(models_dir: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MiniLM, three of its six sites converted."""
    result = latte_convert.convert(models_dir / "minilm-l6", pairs, recipe=Recipe(kernel="latte", samples=6, k=3))
    return result.save(tmp_path_factory.mktemp("minilm") / "hybrid")


@pytest.fixture(scope="session")
def whisper_artifact(models_dir: Path, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Whisper tiny.en, one site converted."""
    recipe = Recipe(kernel="latte", samples=2, holdout=0.5, k=1, include=("decoder.layers.0.self_attn",))
    result = latte_convert.convert(models_dir / "whisper-tiny.en", shared_data / "an4_windows", recipe=recipe)
    return result.save(tmp_path_factory.mktemp("whisper") / "hybrid")
