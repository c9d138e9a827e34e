"""Small checkpoints, and artifacts made of them, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_checkpoints

import latte_convert


@pytest.fixture(scope="session")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DINOv2 of two layers, with its image processor."""
    path = tmp_path_factory.mktemp("export") / "dino"
    return small_checkpoints.dino(path, hidden_size=24, num_hidden_layers=2, num_attention_heads=2)


@pytest.fixture(scope="session")
def hybrid(dino: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its artifact with the LATTE kernel in one layer."""
    recipe = latte_convert.Recipe(kernel="latte", samples=4, k=1)
    result = latte_convert.convert(dino, photos, recipe=recipe, progress=False)
    return result.save(tmp_path_factory.mktemp("export") / "hybrid")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers, for texts of up to 80 tokens."""
    return small_checkpoints.bert(tmp_path_factory.mktemp("export") / "bert")
