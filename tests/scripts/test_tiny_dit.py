"""The scripts around the tiny diffusion transformer, on models of a few steps."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import compare_dit  # noqa: E402
import train_tiny_dit as tiny  # noqa: E402

SIDES = (16, 32)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of 64 and 256 tokens, and training that takes seconds."""
    for module in (tiny, compare_dit):
        monkeypatch.setattr(module, "SIDES", SIDES)
    monkeypatch.setattr(tiny, "STAGES", (((16, 2),), ((16, 1), (32, 1))))
    monkeypatch.setattr(tiny, "train_classifier", lambda steps, seed: tiny.Classifier().eval())


def test_pictures_show_bright_digits_on_dark() -> None:
    pictures = tiny.pictures(range(10), 32, np.random.default_rng(0))
    assert pictures.shape == (10, 3, 32, 32)
    assert pictures.abs().max() <= 1
    values = (pictures + 1).amax(1) / 2  # of hue, saturation and value
    assert (values[:, 0, 0] <= 0.4 + 1e-6).all()
    assert (values.amax((1, 2)) >= 0.8 - 1e-6).all()


def test_noise_of_a_picture_does_not_depend_on_the_others() -> None:
    assert torch.equal(tiny.noise(8, [5, 6])[1], tiny.noise(8, [6])[0])
    assert not torch.equal(*tiny.noise(8, [5, 6]))


def test_larger_pictures_spend_more_time_near_the_noise() -> None:
    small, large = (tiny.shifted(torch.linspace(0, 1, 9), side) for side in (32, 128))
    torch.testing.assert_close(small, torch.linspace(0, 1, 9))
    assert large[[0, -1]].tolist() == [0, 1]
    assert (large[1:-1] < small[1:-1]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_training_is_deterministic_and_writes_what_load_reads(tmp_path: Path) -> None:
    for name in "ab":
        tiny.train(tmp_path / name, (1, 2), seed=3)
    a, b = (tmp_path / name / "diffusion_pytorch_model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert "seed 3; 1 steps at 16 px, 2 steps at 16 px and 32 px" in (tmp_path / "a" / "README.md").read_text()
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) <= 16e6
    model, classifier = tiny.load(tmp_path / "a")
    assert {p.dtype for part in (model, classifier) for p in part.parameters()} == {torch.float32}
    assert 0 <= tiny.evaluate(model, classifier, 16, size=2)["samples_read"] <= 1


def test_what_the_sampler_calls_is_recorded_at_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "LAYERS", 1)
    batches = compare_dit.calls(tiny.build(), samples=3, side=16)
    assert [batch["class_labels"].tolist() for batch in batches] == [[n, 10] for n in (0, 0, 0, 1, 1, 1, 2, 2)]
    assert len({float(batch["timestep"][0]) for batch in batches}) == len(batches)
