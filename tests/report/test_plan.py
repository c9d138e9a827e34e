"""The plan of one conversion, carried out on another checkpoint of the same architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import latte_convert
from latte_convert.errors import InputError, RecipeError, UsageError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def earlier(tiny_dino: Path, photos: Path, tmp_path_factory) -> Path:
    """A conversion that gives its sites two kernels."""
    recipe = Recipe(kernel="auto", candidates=({"kernel": "elu"}, {"kernel": "latte"}), samples=6, k=4)
    result = latte_convert.convert(tiny_dino, photos, recipe=recipe, progress=False)
    return result.save(tmp_path_factory.mktemp("earlier") / "hybrid")


def test_the_same_checkpoint_gives_the_same_hybrid(earlier, tiny_dino, photos):
    again = latte_convert.convert(
        tiny_dino, photos, recipe=Recipe(samples=6), sites_from=earlier / "report.json", progress=False
    )
    before = latte_convert.load(earlier).state_dict()
    after = again.model.state_dict()
    assert again.report.converted == json.loads((earlier / "report.json").read_text())["converted"]
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in before if not key.endswith("_state"))
    assert all(site.score is None for site in again.report.sites)


def test_another_checkpoint_gets_fits_of_its_own(earlier, tiny_dino, photos, tmp_path, latte):
    torch.manual_seed(5)
    config = transformers.Dinov2Config.from_pretrained(tiny_dino)
    other = tmp_path / "other"
    model = transformers.Dinov2Model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(12)
    model.save_pretrained(other)
    (other / "preprocessor_config.json").write_bytes((tiny_dino / "preprocessor_config.json").read_bytes())
    out = tmp_path / "out"
    code, stdout, stderr = latte(
        "convert", other, "--calib", photos, "--samples", 6, "--sites-from", earlier, "--out", out
    )
    assert (code, stdout) == (0, f"{out}\n"), stderr
    before, after = (json.loads((place / "latte.json").read_text()) for place in (earlier, out))
    assert before["sites"] == after["sites"]
    kernels = {place: latte_convert.load(place).state_dict() for place in (earlier, out)}
    assert not all(
        torch.equal(kernels[earlier][key], kernels[out][key]) for key in kernels[out] if key.endswith("latte.sigma")
    )
    assert latte("verify", out)[0] == 0


def test_plans_that_do_not_fit(earlier, tiny_dino, photos, tmp_path):
    def refused(kind: type[Exception], place: Path, recipe: Recipe = Recipe(samples=6)) -> str:  # noqa: B008
        with pytest.raises(kind) as raised:
            latte_convert.convert(tiny_dino, photos, recipe=recipe, sites_from=place, progress=False)
        return str(raised.value)

    assert "leave out ratio" in refused(UsageError, earlier, Recipe(ratio=0.5))
    assert "there is no" in refused(InputError, tmp_path / "absent.json")
    report = json.loads((earlier / "report.json").read_text())
    place = tmp_path / "report.json"

    def changed(**changes) -> Path:
        place.write_text(json.dumps({**report, **changes}))
        return place

    sites = report["sites"]
    nothing = changed(sites=[{**site, "converted": False} for site in sites])
    assert "converts no site" in refused(RecipeError, nothing)
    renamed = changed(sites=[{**site, "name": f"vision.{site['name']}"} for site in sites])
    assert "matches no attention site" in refused(RecipeError, renamed)
    wider = changed(sites=[{**site, "heads": 6} for site in sites])
    assert "the plan is of another architecture" in refused(RecipeError, wider)
    merging = changed(merges={"encoder.blocks.1": 0.5})
    assert "has no block 'encoder.blocks.1'" in refused(RecipeError, merging)
