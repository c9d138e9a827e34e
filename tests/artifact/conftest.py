"""One small artifact for the tests of this folder, and a copy of it for each that changes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def result(tiny_dino: Path, photos: Path):
    import latte_convert

    return latte_convert.convert(tiny_dino, photos, recipe=latte_convert.Recipe(kernel="latte", samples=4))


@pytest.fixture(scope="session")
def saved(result, tmp_path_factory) -> Path:
    return result.save(tmp_path_factory.mktemp("saved") / "hybrid")


@pytest.fixture
def artifact(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "hybrid")
