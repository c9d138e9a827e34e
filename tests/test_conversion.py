"""A conversion end to end, through the Python API.

Most recipes say ``latte``: on the few tokens of the test models the default kernel is exact and has no parameters.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import latte_convert
from latte_convert import conversion
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.feed import SampleFeed
from latte_convert.data.samples import open_samples
from latte_convert.errors import CheckpointError, DataError, GateError, RecipeError
from latte_convert.measuring import fidelity
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def converted(tiny_dino: Path, photos: Path):
    return latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=8))


def batches(model: Path, photos: Path, count: int = 3, seed: int = 9) -> list[dict]:
    source = resolve(model)
    loaded = transformers.AutoModel.from_pretrained(model)
    feed = SampleFeed(open_samples(photos, "image", samples=count, seed=seed), source.processor("image"), loaded)
    return [inputs.kwargs for inputs in feed]


def outputs(model, inputs: list[dict]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**batch).last_hidden_state for batch in inputs])


def test_two_thirds_of_the_sites_most_robust_first(converted):
    report = converted.report
    ranked = sorted(report.sites, key=lambda site: site.score.value)
    assert len(report.sites) == 6
    assert {site.name for site in ranked[:4]} == set(report.converted)
    assert [site.name for site in converted.plan.converted] == report.converted
    assert report.calibration.used == 6
    assert report.calibration.held_out == 2


def test_reported_fidelity_is_that_of_the_hybrid_on_the_held_out_samples(converted, tiny_dino):
    original = transformers.Dinov2Model.from_pretrained(tiny_dino)
    held = [inputs.kwargs for inputs in converted.task.holdout]
    a, b = outputs(original, held), outputs(converted.model, held)
    report = converted.report.fidelity
    expected = torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item()
    assert report.outputs["last_hidden_state"].cosine == pytest.approx(expected, abs=1e-5)
    assert report.outputs["last_hidden_state"].relative_error == pytest.approx(
        ((a - b).norm() / a.norm()).item(), rel=1e-4
    )
    assert expected < 0.9999, "the hybrid must differ from the original for this test to mean anything"
    cls = torch.nn.functional.cosine_similarity(a[:, 0], b[:, 0], dim=-1).mean().item()
    assert report.outputs["last_hidden_state.prefix"].cosine == pytest.approx(cls, abs=1e-5)


def test_held_out_samples_are_not_in_the_fit(converted):
    fitted, held = (feed.feeds[0].samples.ids for feed in (converted.task.fitting, converted.task.holdout))
    assert len(fitted) == 6
    assert not set(fitted) & set(held)


def test_save_load_restore(converted, tiny_dino, photos, tmp_path):
    out = converted.save(tmp_path / "hybrid")
    reloaded = latte_convert.load(out)
    assert type(reloaded) is transformers.Dinov2Model
    inputs = batches(tiny_dino, photos)
    assert torch.allclose(outputs(reloaded, inputs), outputs(converted.model, inputs), atol=1e-5)

    source = load_file(tiny_dino / "model.safetensors")
    saved = load_file(out / "model.safetensors")
    ours = set(saved) - set(source)
    assert all(torch.equal(saved[key], source[key]) and saved[key].dtype == source[key].dtype for key in source)
    assert ours == {
        f"{site}.latte.{name}"
        for site in converted.report.converted
        for name in ("alpha", "delta_q", "delta_k", "beta_q", "beta_k", "sigma")
    }
    for name in ("original/config.json", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (tiny_dino / Path(name).name).read_bytes()

    back = latte_convert.restore(out, tmp_path / "original")
    restored = load_file(back / "model.safetensors")
    assert set(restored) == set(source)
    assert all(torch.equal(restored[key], source[key]) for key in source)
    original = transformers.Dinov2Model.from_pretrained(tiny_dino)
    again = transformers.Dinov2Model.from_pretrained(back)
    assert torch.equal(outputs(original, inputs), outputs(again, inputs))


def test_reload_with_the_source_deleted(tiny_dino, photos, tmp_path):
    source = shutil.copytree(tiny_dino, tmp_path / "source")
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4))
    out = result.save(tmp_path / "hybrid")
    shutil.rmtree(source)
    inputs = batches(tiny_dino, photos)
    assert torch.allclose(outputs(latte_convert.load(out), inputs), outputs(result.model, inputs), atol=1e-5)
    assert transformers.AutoImageProcessor.from_pretrained(out).crop_size["height"] == 56


def test_order_on_disk_does_not_matter(tiny_dino, photos, tmp_path):
    """Equal files created in another order, so that the directory lists them differently."""
    names = sorted(path.name for path in photos.iterdir())[:10]
    hashes = []
    for order, folder in ((names, "forward"), (names[::-1], "backward")):
        directory = tmp_path / folder
        directory.mkdir()
        for name in order:
            shutil.copyfile(photos / name, directory / name)
        result = latte_convert.convert(tiny_dino, directory, recipe=Recipe(kernel="latte", samples=8))
        out = result.save(tmp_path / f"{folder}-out")
        hashes.append((out / "model.safetensors").read_bytes())
    assert hashes[0] == hashes[1]


def test_min_tokens_above_the_sequence_is_the_original_bit_for_bit(tiny_dino, photos):
    result = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4, min_tokens=10_000))
    original = transformers.Dinov2Model.from_pretrained(tiny_dino)
    inputs = batches(tiny_dino, photos)
    assert torch.equal(outputs(original, inputs), outputs(result.model, inputs))
    assert result.report.cost.flops.hybrid == result.report.cost.flops.original
    assert [
        text
        for text in result.report.warnings
        if text.startswith("4 of 4 converted sites need no fewer FLOPs than softmax")
    ]


def test_propagated_error_fits_on_converted_inputs(tiny_dino, photos):
    plain = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=6, ratio=1.0))
    refit = latte_convert.convert(
        tiny_dino, photos, recipe=Recipe(kernel="latte", samples=6, ratio=1.0, propagate_error=True)
    )
    first, last = plain.report.converted[0], plain.report.converted[-1]
    kernels = {r: dict(m.model.named_parameters()) for r, m in (("plain", plain), ("refit", refit))}
    # Nothing is converted before the first site, so its inputs are the same; the last one sees five converted ones.
    assert torch.equal(kernels["plain"][f"{first}.latte.sigma"], kernels["refit"][f"{first}.latte.sigma"])
    assert not torch.equal(kernels["plain"][f"{last}.latte.sigma"], kernels["refit"][f"{last}.latte.sigma"])


def test_score_changes_nothing_and_agrees_with_convert(converted, tiny_dino, photos):
    report = latte_convert.score(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=8))
    assert report.fidelity is None
    assert report.converted == converted.report.converted
    assert [site.score for site in report.sites] == [site.score for site in converted.report.sites]


def test_loaded_model_with_ready_batches(tiny_dino, photos, tmp_path):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    before = copy.deepcopy(model.state_dict())
    result = latte_convert.convert(model, batches(tiny_dino, photos, 6), recipe=Recipe(kernel="latte", k=2))
    assert result.model is model
    assert len(result.report.converted) == 2
    out = result.save(tmp_path / "hybrid")
    inputs = batches(tiny_dino, photos)
    assert torch.allclose(outputs(latte_convert.load(out), inputs), outputs(model, inputs), atol=1e-5)
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_missed_gate_leaves_the_model_alone(tiny_dino, photos):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    inputs = batches(tiny_dino, photos, 6)
    before = outputs(model, inputs)
    with pytest.raises(GateError, match=r"held-out fidelity is 0\.\d+ .* below the 1"):
        latte_convert.convert(model, inputs, recipe=Recipe(kernel="latte", ratio=1.0, min_fidelity=1.0))
    assert torch.equal(before, outputs(model, inputs))
    assert not any(".latte." in key for key in model.state_dict())
    assert all("latte_route" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("scorer", "stage"), [("isolated", "Calibrating"), ("paper", "Scoring"), ("isolated", "Trying conversions")]
)
def test_an_interrupt_leaves_no_hooks(tiny_dino, photos, scorer, stage):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    inputs = batches(tiny_dino, photos, 6)
    steps: Counter[str] = Counter()

    def progress(title: str, _total: int):
        def advance() -> None:
            steps[title] += 1
            if (title, steps[title]) == (stage, 2):
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        latte_convert.convert(model, inputs, recipe=Recipe(kernel="latte", scorer=scorer), progress=progress)
    assert all("latte_route" not in module.__dict__ and not module._forward_hooks for module in model.modules())
    assert not any(".latte." in key for key in model.state_dict())


def test_converting_twice_is_refused(tiny_dino, photos):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    inputs = batches(tiny_dino, photos, 4)
    latte_convert.convert(model, inputs, recipe=Recipe(kernel="latte", k=1))
    with pytest.raises(CheckpointError, match="converted already"):
        latte_convert.convert(model, inputs, recipe=Recipe(kernel="latte", k=6))


def test_an_artifact_can_be_converted_again_from_its_original(converted, photos, tmp_path):
    out = converted.save(tmp_path / "first")
    again = latte_convert.convert(out, photos, recipe=Recipe(kernel="latte", samples=8))
    second = again.save(tmp_path / "second")
    assert (out / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_bf16_checkpoint_keeps_its_dtype(tiny_dino, photos, tmp_path):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino, dtype=torch.bfloat16)
    source = tmp_path / "bf16"
    model.save_pretrained(source)
    shutil.copy(tiny_dino / "preprocessor_config.json", source)
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4))
    saved = load_file(result.save(tmp_path / "hybrid") / "model.safetensors")
    assert {t.dtype for key, t in saved.items() if ".latte." not in key} == {torch.bfloat16}
    assert {t.dtype for key, t in saved.items() if ".latte." in key} == {torch.float32}
    reloaded = latte_convert.load(tmp_path / "hybrid")
    assert reloaded.dtype == torch.bfloat16
    assert latte_convert.verify(tmp_path / "hybrid").probe_difference < 1e-6


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        (Recipe(k=7), RecipeError, "k is 7, but only 6 of 6 sites are eligible"),
        (Recipe(exclude=("layer.9",)), RecipeError, "matches no attention site"),
        (Recipe(samples=4, min_samples=4, exclude=("attention",)), CheckpointError, "excluded by the recipe"),
    ],
)
def test_recipes_that_do_not_fit(tiny_dino, photos, recipe, error, message):
    with pytest.raises(error, match=message):
        latte_convert.convert(tiny_dino, photos, recipe=recipe.model_copy(update={"samples": 4}))


def test_a_loaded_model_needs_batches_and_a_checkpoint_needs_samples(tiny_dino, photos):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    with pytest.raises(DataError, match="ready batches"):
        latte_convert.convert(model, photos)
    with pytest.raises(DataError, match="ready batches go with a loaded model"):
        latte_convert.convert(tiny_dino, [{}])
    with pytest.raises(DataError, match="1 different batches given"):
        latte_convert.convert(model, batches(tiny_dino, photos, 1))


def test_a_model_without_attention_is_refused():
    with pytest.raises(CheckpointError, match="computed no attention"):
        latte_convert.convert(torch.nn.Linear(2, 2), [{"input": torch.randn(1, 2)} for _ in range(2)])


@pytest.mark.parametrize("settings", [{"ratio": 1.0}, {"k": 3}, {"target_speedup": 1.01}, {"max_flops": 0.9}])
def test_a_gate_is_not_met_where_every_kernel_is_softmax(tiny_dino, photos, settings):
    """Of 17 tokens near_far leaves nothing out: a hybrid would be the original, timed against itself."""
    with pytest.raises(GateError, match="no kernel needs fewer FLOPs than softmax"):
        latte_convert.convert(tiny_dino, photos, recipe=Recipe(samples=4, **settings))


def test_a_hybrid_that_is_not_faster_says_so_first_or_is_refused(tiny_dino, photos, monkeypatch):
    monkeypatch.setattr(fidelity.Fidelity, "speedup", property(lambda _self: 0.9))
    report = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4)).report
    assert report.warnings[0].startswith("the hybrid is not faster at this length (17 tokens)")
    with pytest.raises(GateError, match="not faster at this length"):
        latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4, require_faster=True))


def test_a_plan_that_misses_the_fidelity_on_held_out_samples_gives_way_to_a_safer_one(tiny_dino, photos, monkeypatch):
    asked: list[float] = []
    real = conversion.choose_plan

    def watched(*args, margin, **kwargs):
        asked.append(margin)
        return real(*args, margin=margin, **kwargs)

    monkeypatch.setattr(conversion, "choose_plan", watched)
    kept = iter([False, True, True])
    monkeypatch.setattr(conversion, "_kept", lambda _task, _fidelity: next(kept))
    latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4, min_fidelity=0.2))
    assert asked == list(conversion.MARGINS[:2])
