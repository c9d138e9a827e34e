"""Conversions of real pretrained models with the few real samples of ``tests/data``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import latte_convert
from latte_convert.recipe import Recipe


def round_trip(result, tmp_path: Path, source: Path) -> torch.nn.Module:
    """Save, verify, restore bit for bit, and reload."""
    out = result.save(tmp_path / "hybrid")
    assert latte_convert.verify(out).probe_difference < 1e-5
    restored = load_file(latte_convert.restore(out, tmp_path / "original") / "model.safetensors")
    tensors = load_file(source / "model.safetensors")
    assert set(restored) == set(tensors)
    assert all(torch.equal(restored[key], tensor) for key, tensor in tensors.items())
    return latte_convert.load(out)


@torch.no_grad()
def largest_difference(a: torch.nn.Module, b: torch.nn.Module, feed) -> float:
    return max(
        float((x - y).abs().max())
        for inputs in feed
        for x, y in zip(a(**inputs.kwargs).to_tuple(), b(**inputs.kwargs).to_tuple(), strict=True)
        if isinstance(x, torch.Tensor)
    )


def test_dinov2_at_518_px(models_dir, photos, tmp_path):
    source = models_dir / "dinov2-small-saliency"
    recipe = Recipe(kernel="latte", scorer="paper", samples=3, holdout=0.34)
    result = latte_convert.convert(source, photos, recipe=recipe)
    report = result.report
    assert [site.name for site in report.sites] == [f"encoder.layer.{i}.attention" for i in range(12)]
    assert all(site.score.value is not None for site in report.sites)
    assert len(report.converted) == 8
    assert set(report.cost.tokens.values()) == {1370.0}
    # 4 N² d multiply-adds of softmax attention, times 2, in 12 layers of 6 heads of 64.
    assert report.cost.flops.original == 12 * 4 * 1370**2 * 384
    assert report.cost.flops.hybrid < 0.4 * report.cost.flops.original
    hybrid = round_trip(result, tmp_path, source)
    assert largest_difference(hybrid, result.model, result.task.holdout) < 1e-5
    original = transformers.AutoModel.from_pretrained(source).eval()
    (inputs,) = (inputs.kwargs for inputs in result.task.holdout)
    with torch.no_grad():
        outputs = [model(**inputs).last_hidden_state for model in (original, hybrid)]
    cosine = torch.nn.functional.cosine_similarity(*outputs, dim=-1).mean().item()
    assert report.fidelity.outputs["last_hidden_state"].cosine == pytest.approx(cosine, abs=1e-4)
    assert cosine < 0.99  # the faithful kernel is weak on this backbone, and its report says so


def test_dinov2_with_the_default_kernel(models_dir, photos):
    recipe = Recipe(samples=2, holdout=0.5, k=2, include=("layer.1", "layer.10"))
    report = latte_convert.convert(models_dir / "dinov2-small-saliency", photos, recipe=recipe).report
    assert [site.fit.kernel for site in report.sites if site.converted] == ["near_far"] * 2
    saved = report.cost.flops.original - report.cost.flops.hybrid
    assert saved > 0.6 * 2 / 12 * report.cost.flops.original
    assert 0.99 < report.fidelity.outputs["last_hidden_state"].cosine < 0.99999


def test_minilm(models_dir, sentences, tmp_path):
    source = models_dir / "minilm-l6"
    recipe = Recipe(kernel="latte", scorer="paper", samples=24, ratio=0.67, min_fidelity=0.5)
    result = latte_convert.convert(source, sentences, recipe=recipe)
    assert len(result.report.converted) == 4
    assert result.report.calibration.modality == "text"
    reloaded = round_trip(result, tmp_path, source)
    assert largest_difference(reloaded, result.model, result.task.holdout) < 1e-5


def test_minilm_truncates_and_counts_long_text(models_dir, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join([f"short sentence number {i}" for i in range(5)] + ["word " * 700]) + "\n")
    result = latte_convert.convert(models_dir / "minilm-l6", texts, recipe=Recipe(kernel="latte", samples=6, k=1))
    assert result.report.calibration.truncated == 1


def test_whisper_encoder_decoder_and_cross(models_dir, speech, tmp_path):
    source = models_dir / "whisper-tiny.en"
    recipe = Recipe(kernel="latte", scorer="paper", samples=3, holdout=0.34, k=6)
    result = latte_convert.convert(source, speech, recipe=recipe)
    kinds = {(s.tower, s.kind, s.causal) for s in result.report.sites if s.eligible}
    assert kinds == {("encoder", "self", False), ("decoder", "self", True), ("decoder", "cross", False)}
    assert len(result.report.sites) == 12
    assert result.report.fidelity.primary == "logits"
    assert result.report.fidelity.outputs["logits"].top1 is not None
    reloaded = round_trip(result, tmp_path, source)
    features = next(iter(result.task.holdout)).kwargs["input_features"]
    tokens = [model.generate(features, max_new_tokens=12, do_sample=False) for model in (result.model, reloaded)]
    assert torch.equal(*tokens)


def test_the_wrong_data_is_named(models_dir, photos):
    with pytest.raises(latte_convert.LatteError, match="this model takes text"):
        latte_convert.convert(models_dir / "minilm-l6", photos)
