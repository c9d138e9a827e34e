"""Fixtures shared by all tests: where real data and real models are, and what their absence means."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

# The models are tiny: two threads that wait for each other take many times as long as one. Processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# Nothing in the tests may reach for a hub; the models are on disk or not there.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Fresh memory holds NaN in every test: a model that leaves a parameter to chance cannot pass on a lucky day.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

DATA_ENV = "LATTE_TEST_DATA"
MODELS_ENV = "LATTE_TEST_MODELS"
DATA = Path(__file__).parent / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever reads the real models is slow."""
    for item in items:
        if "models_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Every fixture and every test begins with the same seed, whatever ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    pytest_fixture_setup()
    result = yield
    assert logging.root.manager.disable == 0, "this test leaves logging switched off for the others"
    return result


def _absent(kind: str, what: str, variable: str) -> None:
    """Skip where something real is absent; in CI (``LATTE_REQUIRE_REAL=models,data``) that is a failure instead."""
    message = f"{what} not found: set {variable}"
    if kind in os.environ.get("LATTE_REQUIRE_REAL", "").split(","):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five photographs of ``tests/data`` and the left and right half of each: 15 JPEG files."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    for path in sorted((DATA / "photos").glob("*.jpg")):
        shutil.copy(path, folder)
        with Image.open(path) as photo:
            width, height = photo.size
            photo.crop((0, 0, width // 2, height)).save(folder / f"{path.stem}-left.jpg")
            photo.crop((width // 2, 0, width, height)).save(folder / f"{path.stem}-right.jpg")
    return folder


@pytest.fixture(scope="session")
def speech() -> Path:
    """Three spoken sentences of about three seconds, and ``metadata.csv`` with what they say."""
    return DATA / "speech"


@pytest.fixture(scope="session")
def sentences() -> Path:
    """Twenty rows of two sentences and their similarity from 0 to 5, without a header."""
    return DATA / "sentences.csv"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with ``an4_windows`` and ``stsb``, for the measurements that need many samples."""
    here = Path(__file__).resolve().parents[1]
    path = Path(os.environ.get(DATA_ENV) or here.parent / "shared" / "data")
    if not (path / "stsb").is_dir():
        _absent("data", "real test data", DATA_ENV)
    return path


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Folder with the converted real models, as ``scripts/fetch_models.py --out`` writes them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get(MODELS_ENV) or cache / "latte_convert" / "models")
    if not (path / "dinov2-small-saliency" / "model.safetensors").is_file():
        _absent("models", "real models (scripts/fetch_models.py)", MODELS_ENV)
    return path


@pytest.fixture(scope="session")
def tiny_dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random DINOv2 checkpoint whose attention is far from uniform, with its image processor."""
    import small_checkpoints

    path = tmp_path_factory.mktemp("models") / "tiny-dino"
    return small_checkpoints.dino(
        path, hidden_size=48, num_hidden_layers=6, num_attention_heads=3, layerscale_value=0.3
    )


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random CLIP checkpoint with image processor and a word-level tokenizer."""
    import transformers
    from small_checkpoints import VOCABULARY, sharpen, words

    shared = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={
                **shared, "vocab_size": len(VOCABULARY), "max_position_embeddings": 24, "pad_token_id": 0,
                "bos_token_id": 1, "eos_token_id": 2,
            },
            vision_config={**shared, "image_size": 48, "patch_size": 8},
            projection_dim=16,
        )
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny-clip"
    sharpen(model, "proj.weight", factor=20).save_pretrained(path)
    transformers.CLIPImageProcessor(
        size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}
    ).save_pretrained(path)  # fmt: skip
    return words(path, 24)


@pytest.fixture
def latte(monkeypatch, capsys):
    """Run the command line in this process: ``latte(*args) -> (exit code, stdout, stderr)``."""

    from latte_convert.cli.app import main

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latte", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
