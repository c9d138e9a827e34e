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
