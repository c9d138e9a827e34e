"""Vision towers inside vision-language models: found, told from the language model, converted, saved and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import assert_same, eligible, exact_handlers
from torch import Tensor
from vision_language_models import MODELS, build

import latte_convert
from latte_convert.adapters.host import Host
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

PHOTOS = Path(__file__).parents[1] / "data" / "photos"


def _shifted(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Another sample: the same words, other pixels."""
    return {name: value + 0.1 * number if value.is_floating_point() else value for name, value in batch.items()}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_exact_kernel_gives_the_original(name: str) -> None:
    model, batch = build(name), MODELS[name].inputs()
    expected = model(**batch).logits
    handlers = exact_handlers(eligible(model))
    with Host.of(model).watch(handlers):
        assert_same(model(**batch).logits, expected)
    assert {site.name for site in Host.of(model).sites() if site.tower == "vision"} == set(MODELS[name].sites)


@pytest.mark.parametrize("name", MODELS)
def test_the_vision_tower_is_converted_saved_and_read_back(name: str, tmp_path: Path) -> None:
    model, batch = build(name), MODELS[name].inputs()
    with torch.no_grad():
        original = model(**batch).logits
    recipe = Recipe(kernel="latte", towers=["vision"], ratio=1.0, samples=3)
    result = latte_convert.convert(model, [_shifted(batch, i) for i in range(3)], recipe=recipe, progress=False)
    sites = {site.name: site for site in result.report.sites if site.tower == "vision"}
    assert {name: site.reason or site.layout for name, site in sites.items()} == MODELS[name].sites
    assert result.report.converted == [name for name, site in sites.items() if site.reason is None]
    assert not any(site.causal for site in sites.values())
    lost = any(site.layout == "sequence" for site in sites.values() if site.converted)
    assert any("grid" in warning for warning in result.report.warnings) == lost

    out = result.save(tmp_path / "hybrid")
    latte_convert.verify(out)
    again = latte_convert.load(out)
    assert type(again) is type(model)
    with torch.no_grad():
        hybrid = model(**batch).logits
        torch.testing.assert_close(again(**batch).logits, hybrid, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(hybrid, original, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_from_a_checkpoint_and_photographs(name: str, tmp_path: Path) -> None:
    """What photographs reach: the vision tower alone, judged by the features that the language model reads."""
    build(name).save_pretrained(tmp_path / "model")
    MODELS[name].processor().save_pretrained(tmp_path / "model")
    recipe = Recipe(kernel="latte", towers=["vision"], ratio=1.0, samples=4)
    result = latte_convert.convert(tmp_path / "model", PHOTOS, recipe=recipe, progress=False)
    reasons = {site.name: site.reason for site in result.report.sites}
    kept = {site: said for site, said in MODELS[name].sites.items() if said.startswith(("unused", "windowed"))}
    assert result.report.converted == [site for site in MODELS[name].sites if site not in kept]
    assert all((reasons[site] or "").startswith(said.partition(":")[0]) for site, said in kept.items())
    others = {reason for site, reason in reasons.items() if site not in MODELS[name].sites}
    assert others == {"no samples reach the text tower"}
    assert result.report.fidelity is not None
    assert result.report.fidelity.primary.startswith(("vision.pooler_output", "vision.deepstack_features"))
    out = result.save(tmp_path / "hybrid")
    assert latte_convert.verify(out).probe_difference is not None
    latte_convert.load(out)
