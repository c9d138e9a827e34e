"""Eight photographs, and an artifact made of some of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def photos(photos: Path, tmp_path_factory) -> Path:
    """Eight of the photographs: fewer than some commands ask for."""
    folder = tmp_path_factory.mktemp("eight")
    for path in sorted(photos.iterdir())[:8]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="session")
def artifact(tiny_dino: Path, photos: Path, tmp_path_factory) -> Path:
    import latte_convert

    result = latte_convert.convert(tiny_dino, photos, recipe=latte_convert.Recipe(kernel="latte", samples=4))
    return result.save(tmp_path_factory.mktemp("cli") / "hybrid")
