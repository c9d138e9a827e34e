"""The two models that this project trains, converted once a session, with held-out data of theirs."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))


class Scenes(NamedTuple):
    """Held-out scenes for the tiny CLIP: image files and two captions of each."""

    root: Path
    captions: dict[str, list[str]]


@pytest.fixture(scope="session")
def tiny_models() -> Path:
    return ROOT / "tests" / "models"


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """60 scenes with COCO captions: one names the largest digit, the other the two largest."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'latte-convert[demo]'")
    import train_tiny_clip as tiny

    root = tmp_path_factory.mktemp("scenes")
    (root / "images").mkdir()
    captions: dict[str, list[str]] = {}
    for index in itertools.count():
        scene = tiny.render("heldout", index, 0, tiny.SIZE)
        if len(scene.labels) < 2:
            continue
        name = f"{index:03d}.png"
        Image.fromarray(scene.image).save(root / "images" / name)
        captions[name] = [tiny.caption(len(scene.labels), tiny.largest(scene, most)) for most in (1, 2)]
        if len(captions) == 60:
            break
    images = [{"id": i, "file_name": name} for i, name in enumerate(captions)]
    texts = [
        {"id": 2 * i + j, "image_id": i, "caption": text}
        for i, pair in enumerate(captions.values())
        for j, text in enumerate(pair)
    ]
    (root / "captions.json").write_text(json.dumps({"images": images, "annotations": texts}, indent=1))
    return Scenes(root, captions)


@pytest.fixture(scope="session")
def clip_artifact(tiny_models: Path, scenes: Scenes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny CLIP with a site of each tower converted."""
    import latte_convert
    from latte_convert.recipe import Recipe

    texts = tmp_path_factory.mktemp("calib") / "texts.txt"
    texts.write_text("\n".join(itertools.chain.from_iterable(scenes.captions.values())) + "\n")
    include = tuple(f"{tower}_model.encoder.layers.1.*" for tower in ("vision", "text"))
    recipe = Recipe(kernel="latte", samples=4, ratio=1.0, include=include)
    result = latte_convert.convert(tiny_models / "tiny-clip", [scenes.root / "images", texts], recipe=recipe)
    return result.save(tmp_path_factory.mktemp("clip") / "hybrid")
