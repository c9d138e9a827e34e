"""Every artifact has a model card that the Hub reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import latte_convert
from latte_convert.artifact.card import card_text
from latte_convert.artifact.manifest import read_manifest
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

BASE = """---
license: apache-2.0
pipeline_tag: image-feature-extraction
tags: [theirs]
model-index: []
---
# DINO
"""


def test_the_card_of_a_conversion(saved: Path, result: Any) -> None:
    card = ModelCard.load(saved / "README.md")
    fields = card.data.to_dict()
    assert fields["library_name"] == "transformers"
    assert {"latte-convert", "linear-attention", "latte"} == set(fields["tags"])
    assert "base_model" not in fields  # it lies on this disk
    primary = result.report.fidelity.outputs[result.report.fidelity.primary]
    found = {each.metric_type: each for each in card.data.eval_results}
    first = found[f"cosine of {result.report.fidelity.primary}"]
    assert first.metric_value == primary.cosine
    assert first.metric_args == {"samples": result.report.fidelity.samples}  # of one sample there is no interval
    assert "import latte_convert" in card.content
    assert "held out" in card.content or "not seen" in card.content
    assert latte_convert.verify(saved).results == 3  # the report as JSON and page, and the card


def test_what_the_base_says_of_itself(tiny_dino: Path, photos: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_dino, tmp_path / "source")
    (source / "README.md").write_text(BASE)
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
    out = result.save(tmp_path / "hybrid")
    fields = ModelCard.load(out / "README.md").data.to_dict()
    assert fields["license"] == "apache-2.0"
    assert fields["pipeline_tag"] == "image-feature-extraction"
    assert "theirs" not in fields["tags"]
    again = latte_convert.save(latte_convert.load(out), tmp_path / "again")
    assert ModelCard.load(again / "README.md").data.license == "apache-2.0"
    for artifact in (out, again):
        assert (latte_convert.restore(artifact, tmp_path / f"o {artifact.name}") / "README.md").read_text() == BASE
    (out / "README.md").write_text(BASE)
    with pytest.raises(latte_convert.LatteError, match=r"README\.md' is not the file that was saved"):
        latte_convert.verify(out)


def test_a_base_of_the_hub(saved: Path) -> None:
    manifest = read_manifest(saved)
    source = manifest.source.model_copy(update={"id": "facebook/dinov2-small", "revision": "0" * 40})
    card = ModelCard(card_text(manifest.model_copy(update={"source": source}), None))
    assert card.data.base_model == "facebook/dinov2-small"
    assert "https://huggingface.co/facebook/dinov2-small" in card.content


@pytest.mark.parametrize(
    "text", ["no fields", "---\n: [\n---\n", "---\nlicense: [1, {}]\n---\n", "---\n- a\n---\n", ""]
)
def test_a_base_whose_card_cannot_be_read(text: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    ModelCard(card_text(read_manifest(saved), tmp_path / "README.md"))


def test_the_report_adds_evaluations(artifact: Path, photos: Path, latte: Any) -> None:
    for arguments in (
        ("eval", artifact, "--task", "fidelity", "--data", photos, "--samples", 4, "--out", artifact / "eval-f.json"),
        ("report", artifact),
        ("verify", artifact),
    ):
        code, _, stderr = latte(*arguments)
        assert code == 0, stderr
    results = {each.metric_type: each for each in ModelCard.load(artifact / "README.md").data.eval_results}
    low, high = results["relative_error"].metric_args["retention_95"]
    assert 0 < low <= high <= 1
