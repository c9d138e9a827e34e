"""Plans that merge tokens: what a recipe asks for, what a speed takes, and what is saved of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import transformers

import latte_convert
from latte_convert.artifact.manifest import read_manifest
from latte_convert.errors import GateError, IntegrityError, RecipeError
from latte_convert.recipe import Recipe
from latte_convert.selection import fast
from latte_convert.selection.merging import schedule

pytestmark = pytest.mark.slow

BLOCKS = tuple(f"encoder.layer.{index}" for index in range(6))
MERGE = {"kernel": "latte", "ratio": 0, "merge": 0.5, "samples": 6, "resolution": 112}


def test_a_schedule_begins_with_all_tokens_and_ends_with_the_share():
    even = schedule(BLOCKS, 0.5)
    assert list(even) == list(BLOCKS)
    assert list(even.values()) == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5])
    early = list(schedule(BLOCKS, 0.5, 0.5).values())
    assert (early[0], early[-1]) == (1, 0.5)
    assert all(a < b for a, b in zip(early[1:-1], list(even.values())[1:-1], strict=True))


@pytest.fixture(scope="module")
def converted(tiny_dino: Path, photos: Path):
    return latte_convert.convert(tiny_dino, photos, recipe=Recipe(**MERGE))


@pytest.fixture(scope="module")
def saved(converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted.save(tmp_path_factory.mktemp("merged") / "hybrid")


def _outputs(model) -> torch.Tensor:
    pixels = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(pixel_values=pixels).last_hidden_state


def test_the_report_says_what_was_merged_and_counts_what_ran(converted):
    report = converted.report
    assert report.merges == pytest.approx(dict(zip(BLOCKS, [1, 0.9, 0.8, 0.7, 0.6, 0.5], strict=True)))
    assert report.changed
    assert not report.converted
    assert "tokens merged to 50% over 6 blocks" in repr(converted)
    # Six sites on 1 + 64 tokens and fewer, both matmuls, 3 heads of 16.
    kept = [1 + round(64 * share) for share in report.merges.values()]
    assert report.cost.flops.original == 6 * 4 * 65**2 * 48
    assert report.cost.flops.hybrid == sum(4 * tokens**2 * 48 for tokens in kept)
    chosen = next(point for point in report.frontier if point.chosen)
    assert chosen.tokens_left == 0.5
    assert chosen.flops_share == pytest.approx(report.cost.flops.hybrid / report.cost.flops.original)


def test_saved_loaded_verified_and_restored(converted, saved, tiny_dino, tmp_path):
    expected = _outputs(converted.model)
    assert torch.equal(_outputs(latte_convert.load(saved, verify=True)), expected)
    assert torch.equal(_outputs(transformers.AutoModel.from_pretrained(saved)), expected)
    assert [merge.name for merge in read_manifest(saved).merges] == list(BLOCKS)
    latte_convert.restore(saved, tmp_path / "original")
    original = transformers.AutoModel.from_pretrained(tiny_dino)
    assert torch.equal(_outputs(transformers.AutoModel.from_pretrained(tmp_path / "original")), _outputs(original))
    assert not torch.equal(_outputs(original), expected)
    renewed = latte_convert.load(saved)
    latte_convert.save(renewed, tmp_path / "again")
    assert torch.equal(_outputs(latte_convert.load(tmp_path / "again")), expected)


def test_another_merging_is_another_fingerprint(saved):
    manifest = read_manifest(saved)
    changed = manifest.model_copy(update={"merges": [manifest.merges[0]]})
    none = manifest.model_copy(update={"merges": []})
    assert len({manifest.fingerprint, changed.fingerprint, none.fingerprint}) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("encoder.layer.5", "encoder.layer.9", "no block"),
        ('"share": 0.5', '"share": 1.5', "share"),
        ("layer.4", "layer.3", "twice"),
    ],
)
def test_a_damaged_manifest_is_named(saved, tmp_path, old, new, message):
    copied = shutil.copytree(saved, tmp_path / "hybrid")
    text = (copied / "latte.json").read_text()
    head, merges = text.split('"merges"')
    (copied / "latte.json").write_text(head + '"merges"' + merges.replace(old, new, 1))
    with pytest.raises(IntegrityError, match=message):
        latte_convert.load(copied)


def test_bench_times_what_merges(saved, photos):
    from latte_convert.bench.run import bench

    report = bench(saved, resolutions=[112], data=str(photos), rounds=1, compile=False, progress=False)
    hybrid = report.lengths[0].variant("hybrid")
    assert hybrid.detail == "tokens merged to 50%"
    assert hybrid.cosine < 1
    assert hybrid.attention is None


def test_a_kernel_without_a_form_for_merged_tokens(tiny_dino, photos):
    with pytest.raises(RecipeError, match=r"no form for merged tokens.*blocks"):
        latte_convert.convert(tiny_dino, photos, recipe=Recipe(**{**MERGE, "ratio": 0.5}), progress=False)


def test_a_model_that_cannot_be_merged(tiny_dino, photos):
    with pytest.raises(RecipeError, match="too few to merge"):
        latte_convert.convert(tiny_dino, photos, recipe=Recipe(**{**MERGE, "resolution": 56}), progress=False)


def _by_tokens(_task, _fitted, point) -> float:
    """Speed by the tokens that blocks work on, and a little by kernels: a clock that does not tick."""
    return 1 / (fmean(point.merges.values() or [1.0]) - 0.02 * len(point.kernels))


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(fast, "speed_of", _by_tokens)
    monkeypatch.setattr("latte_convert.selection.choice.speed_of", lambda *_: 1.0)


def test_a_speed_is_reached_by_merging_where_kernels_do_not(counted, tiny_dino, photos):
    recipe = Recipe(target_speedup=1.2, samples=6, resolution=112)
    result = latte_convert.convert(tiny_dino, photos, recipe=recipe, progress=False)
    assert not result.report.converted  # blocks is softmax on so few tokens
    assert 1.2 <= 1 / fmean(result.report.merges.values()) < 1.25
    assert result.report.recipe["kernel"] == "blocks"
    with pytest.raises(GateError, match=r"fastest that merges tokens reaches [12]\.\d"):
        latte_convert.convert(
            tiny_dino, photos, recipe=recipe.model_copy(update={"target_speedup": 9.0}), progress=False
        )
    with pytest.raises(GateError, match="no plan"):
        latte_convert.convert(tiny_dino, photos, recipe=recipe.model_copy(update={"merge": 1.0}), progress=False)


def test_a_kernel_that_takes_no_merged_tokens_is_weighed_against_merging(counted, tiny_dino, photos):
    recipe = Recipe(kernel="latte", target_speedup=1.2, samples=6, resolution=112)
    result = latte_convert.convert(tiny_dino, photos, recipe=recipe, progress=False)
    assert not result.report.converted
    assert result.report.merges


def test_kernels_and_merging_in_one_plan(counted, monkeypatch, tiny_dino, photos, tmp_path):
    monkeypatch.setattr(fast, "drifts_of", _prefer_kernels)
    recipe = Recipe(target_speedup=1.5, samples=4, resolution=448)
    result = latte_convert.convert(tiny_dino, photos, recipe=recipe, progress=False)
    converted = [site for site in result.report.sites if site.converted]
    assert len(converted) == 6
    assert {site.fit.kernel for site in converted} == {"blocks"}
    assert min(result.report.merges.values()) < 1
    out = result.save(tmp_path / "hybrid")
    assert torch.equal(_outputs(latte_convert.load(out, verify=True)), _outputs(result.model))


def _prefer_kernels(task, fitted, points, samples):
    """As if plans lost less the more kernels they have."""
    alike = SimpleNamespace(likeness=0.9, cosine=0.9)
    return [SimpleNamespace(error=-len(point.kernels), worst=alike, least_cosine=alike) for point in points]
