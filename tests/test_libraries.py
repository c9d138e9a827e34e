"""What other libraries make of an artifact's directory: the hybrid, once this package is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoints
import torch
import transformers

import latte_convert
from latte_convert.adapters.host import Host
from latte_convert.artifact.load import open_artifact
from latte_convert.checkpoints.mark import METHOD

MODELS = Path(__file__).parent / "models"
PHOTO = Path(__file__).parent / "data" / "photos" / "cat.jpg"
TEXTS = ["The man is playing with a dog.", "A girl and a boy on the lawn, in the sun of the afternoon."]
NEAR_FAR: dict[str, Any] = {"kernel": "near_far", "options": {"window": 2, "halo": 1, "clusters": 4}}


@dataclass(frozen=True)
class Row:
    """A task of ``transformers.pipeline``: what writes its model, what it is converted on and how, and a call."""

    write: Callable[[Path], Path]
    data: str
    recipe: dict[str, Any]
    call: tuple[Any, dict[str, Any]]
    numbers: Callable[[Any], Any] = field(default=lambda found: found)


ROWS: dict[str, Row] = {
    "feature-extraction": Row(
        small_checkpoints.bert, "sentences", {"kernel": "latte", "ratio": 1.0}, (TEXTS[0], {}), lambda found: found[0]
    ),
    "image-feature-extraction": Row(
        lambda path: small_checkpoints.dino(path, hidden_size=24, num_hidden_layers=2, num_attention_heads=2),
        "photos", {"kernel": "latte", "ratio": 1.0}, (str(PHOTO), {}), lambda found: found[0],
    ),
    "object-detection": Row(
        lambda _: MODELS / "tiny-detr", "photos", {"kernel": "latte", "k": 2}, (str(PHOTO), {"threshold": 0.0}),
        lambda found: [[each["score"], *each["box"].values()] for each in found],
    ),
    "zero-shot-image-classification": Row(
        lambda _: MODELS / "tiny-clip", "photos", {**NEAR_FAR, "k": 2},
        (str(PHOTO), {"candidate_labels": ["zero", "one", "two"]}), lambda found: [each["score"] for each in found],
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", ROWS)
def test_a_pipeline_of_a_directory_runs_the_hybrid(task: Any, photos: Path, sentences: Path, tmp_path: Path) -> None:
    row = ROWS[task]
    source = row.write(tmp_path / "source")
    recipe = latte_convert.Recipe(samples=4, **row.recipe)
    data = {"photos": photos, "sentences": sentences}[row.data]
    saved = latte_convert.convert(source, data, recipe=recipe, progress=False).save(tmp_path / "hybrid")

    def made(place: Path) -> Any:
        inputs, options = row.call
        return transformers.pipeline(task, model=str(place))(inputs, **options)

    expected = transformers.pipeline(task, model=str(source))
    Host.of(expected.model).convert(dict(open_artifact(saved).kernels))
    inputs, options = row.call
    by_hand = np.array(row.numbers(expected(inputs, **options)), dtype=np.float64)
    found = np.array(row.numbers(made(saved)), dtype=np.float64)
    np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, np.array(row.numbers(made(source)), dtype=np.float64), atol=1e-4)


def test_the_speech_pipeline_of_a_directory(models_dir: Path, speech: Path, tmp_path: Path) -> None:
    """With beams, words and segments, which read the weights of cross-attention: exact ones, of the hybrid's states."""
    import soundfile

    recipe = latte_convert.Recipe(kernel="near_far", samples=2, holdout=0.5, include=("model.encoder.*",), ratio=1.0)
    result = latte_convert.convert(models_dir / "whisper-tiny.en", speech, recipe=recipe, progress=False)
    saved = result.save(tmp_path / "hybrid")
    wave, rate = soundfile.read(sorted(speech.rglob("*.wav"))[0], dtype="float32")
    tools = {
        "tokenizer": transformers.AutoTokenizer.from_pretrained(saved),
        "feature_extractor": transformers.AutoFeatureExtractor.from_pretrained(saved),
    }

    def heard(model: Any, **tools: Any) -> Iterator[Any]:
        listen = transformers.pipeline("automatic-speech-recognition", model=model, **tools)
        assert latte_convert.is_hybrid(listen.model)
        listen.model.generation_config.alignment_heads = [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2]]
        for kind in ("word", True):
            sound = {"raw": wave, "sampling_rate": rate}  # which the pipeline empties
            yield listen(sound, return_timestamps=kind, generate_kwargs={"num_beams": 2, "max_new_tokens": 40})

    found = list(heard(str(saved)))
    assert found == list(heard(latte_convert.load(saved), **tools))
    assert len(found[0]["chunks"]) > 5


@pytest.fixture(scope="module")
def minilm(models_dir: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = latte_convert.Recipe(kernel="latte", samples=6, k=3)
    result = latte_convert.convert(models_dir / "minilm-l6", sentences, recipe=recipe, progress=False)
    return result.save(tmp_path_factory.mktemp("minilm") / "hybrid")


def embedded(model: Any, tokenizer: Any) -> np.ndarray:
    """As MiniLM's own modules say: the mean over what is no padding, of length 1."""
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    weight = batch["attention_mask"][..., None]
    mean = (states * weight).sum(1) / weight.sum(1)
    found: np.ndarray = torch.nn.functional.normalize(mean, dim=-1).numpy()
    return found


def test_sentence_transformers(minilm: Path, models_dir: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm), device="cpu")
    expected = embedded(latte_convert.load(minilm), model.tokenizer)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    original = SentenceTransformer(str(models_dir / "minilm-l6"), device="cpu").encode(TEXTS)
    assert not np.allclose(expected, original, atol=1e-2)
    model.save_pretrained(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(embedded(latte_convert.load(tmp_path / "again"), again.tokenizer), expected, atol=1e-6)


ALONE = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer

found = SentenceTransformer(sys.argv[1], device="cpu").encode(sys.argv[3:])
assert "latte_convert" not in sys.modules
np.save(sys.argv[2], found)
"""


def test_sentence_transformers_alone_warns(minilm: Path, models_dir: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    command = [sys.executable, "-c", ALONE, str(minilm), str(tmp_path / "found.npy"), *TEXTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert METHOD in done.stderr
    original = SentenceTransformer(str(models_dir / "minilm-l6"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), original, atol=1e-6)
