"""scripts/sweep_models.py: what becomes of an architecture is said of every one, and a sample of them is swept here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import sweep_models
from sweep_models import (
    ACCEPTED,
    DIFFERENT,
    FAILED,
    LISTED,
    NO_ATTENTION,
    NOT_BUILT,
    NOT_RUN,
    REFUSED,
    SAME,
    main,
    outcome,
    ran,
)

from latte_convert.adapters.hf import HFAdapter
from latte_convert.kernels.softmax import softmax_attention


@pytest.mark.parametrize("pattern", ["dinov2", "qwen2_vl", "t5_", "pit_", "resnetv2", "coca_base", "roberta-ViT-B-32"])
def test_a_sample_of_the_sweep_has_no_traceback(pattern: str) -> None:
    found = list(sweep_models.sweep(pattern))
    assert found
    assert not [each for each in found if each.kind == FAILED]


def _raise(_model: nn.Module) -> None:
    raise KeyError("layers")


@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("qwen2_vl", ACCEPTED, "vision self"),
        ("swin", LISTED, "windowed attention"),
        ("resnet", NO_ATTENTION, ""),
        ("encoder-decoder", NOT_BUILT, ""),
    ],
)
def test_outcomes(name: str, kind: str, detail: str) -> None:
    build = dict(sweep_models._transformers())[name]
    found = outcome("transformers", name, build)
    assert (found.kind, detail in found.detail) == (kind, True)


def _dino(**options: Any) -> nn.Module:
    return transformers.Dinov2Model(
        transformers.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=56, **options)
    )


def test_a_run_tells_the_same_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = dict(sweep_models._open_clip())["ViT-B-32"]
    assert ran(_dino) == ran(clip) == SAME
    monkeypatch.setattr(sweep_models, "softmax_attention", lambda call: 2 * softmax_attention(call))
    assert ran(_dino).startswith(f"{DIFFERENT}: last_hidden_state")
    monkeypatch.setattr(sweep_models, "softmax_attention", _raise)
    assert ran(_dino).startswith(FAILED)
    monkeypatch.setattr(sweep_models, "PARAMETERS", 1000)
    assert ran(_dino).startswith(NOT_RUN)


def test_what_no_adapter_knows_is_refused_and_what_breaks_one_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome("torch", "linear", lambda: nn.Linear(2, 2)).kind == REFUSED
    monkeypatch.setattr(HFAdapter, "sites", lambda self, model: _raise(model))
    assert main(["resnet50"]) == 0
    assert main(["bert-generation"]) == 1
    assert "KeyError" in capsys.readouterr().out
