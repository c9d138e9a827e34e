"""Plans are chosen: a kernel for each site, within a budget, on models that this project trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import latte_convert
from latte_convert.attention import CallShape, TokenLayout
from latte_convert.errors import CheckpointError, GateError
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.recipe import Candidate, Recipe

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import measure_tiny  # noqa: E402
import train_tiny_detr  # noqa: E402
from scenes import write_scenes  # noqa: E402

pytestmark = pytest.mark.slow

DETR, CLIP = ROOT / "tests" / "models" / "tiny-detr", ROOT / "tests" / "models" / "tiny-clip"
SMALL = {"window": 2, "halo": 1, "clusters": 4}
"""near_far that is not exact on the 12 x 12 tokens of the detector's encoder."""
BOTH = (Candidate(kernel="latte"), Candidate(kernel="near_far", options=SMALL))
ENCODER = 144
QUERIES = 9


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, "train", 6)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return measure_tiny.write_pairs(tmp_path_factory.mktemp("pairs"), 6)


def convert(scenes: Path, **settings):
    recipe = Recipe(kernel="auto", candidates=BOTH, **{"samples": 4, **settings})
    return latte_convert.convert(DETR, scenes, recipe=recipe)


@pytest.fixture(scope="module")
def chosen(scenes: Path):
    return convert(scenes, ratio=1.0)


def shape(name: str) -> CallShape:
    """What a site of the detector is called with: 12 x 12 tokens from the backbone, 9 object queries."""
    sizes = {"heads": 4, "head_dim": 32, "value_dim": 32}
    if ".encoder." in name:
        return CallShape(ENCODER, ENCODER, layout=TokenLayout(grid=(12, 12)), **sizes)
    if name.endswith("encoder_attn"):
        return CallShape(QUERIES, ENCODER, layout=TokenLayout(grid=(12, 12), aligned=False), **sizes)
    return CallShape(QUERIES, QUERIES, **sizes)


def flops_share(result) -> float:
    """Attention FLOPs of the hybrid over those of the original, counted again."""
    sites = [site.name for site in result.report.sites]
    kernels = {name: result.model.get_submodule(name).latte for name in result.report.converted}
    left = sum(kernels[name].flops(shape(name)) if name in kernels else softmax_flops(shape(name)) for name in sites)
    return left / sum(softmax_flops(shape(name)) for name in sites)


@torch.no_grad()
def outputs(model: torch.nn.Module, feed) -> dict[str, torch.Tensor]:
    found = [model(**inputs.kwargs) for inputs in feed]
    return {name: torch.cat([output[name] for output in found]) for name in ("logits", "pred_boxes")}


def test_every_site_gets_the_kernel_that_hurts_it_least(chosen, scenes):
    alone = [
        latte_convert.score(DETR, scenes, recipe=Recipe(kernel=each.kernel, options=each.options, samples=4))
        for each in BOTH
    ]
    values = {
        each.name: [each.score.value, other.score.value] for each, other in zip(*(r.sites for r in alone), strict=True)
    }
    best = {name: ("latte", "near_far")[pair.index(min(pair))] for name, pair in values.items()}
    # On nine object queries near_far is softmax itself: it loses nothing, and gains nothing.
    best |= {name: "latte" for name in best if ".decoder." in name and name.endswith("self_attn")}
    assert set(best.values()) == {"latte", "near_far"}
    assert dict(chosen.plan.kernels) == best
    assert {site.name: site.fit.kernel for site in chosen.report.sites} == best
    for site in chosen.report.sites:
        used = values[site.name][("latte", "near_far").index(best[site.name])]
        assert site.score.value == pytest.approx(used, rel=1e-6)


def test_an_artifact_with_two_kernels(chosen, tmp_path):
    out = chosen.save(tmp_path / "hybrid")
    records = {site["name"]: site for site in json.loads((out / "latte.json").read_text())["sites"]}
    assert {name: site["kernel"] for name, site in records.items()} == dict(chosen.plan.kernels)
    near = {name for name, site in records.items() if site["kernel"] == "near_far"}
    assert all(records[name]["options"].items() >= SMALL.items() for name in near)
    assert not any("window" in records[name]["options"] for name in records.keys() - near)
    source, saved = load_file(DETR / "model.safetensors"), load_file(out / "model.safetensors")
    # Only latte has parameters.
    assert {key.rpartition(".latte.")[0] for key in saved.keys() - source.keys()} == records.keys() - near

    assert latte_convert.verify(out).probe_difference < 1e-5
    feed = list(chosen.task.holdout)
    hybrid, again = outputs(chosen.model, feed), outputs(latte_convert.load(out), feed)
    assert all(torch.equal(hybrid[name], again[name]) for name in hybrid)
    original, _ = train_tiny_detr.load(DETR)
    assert not torch.allclose(hybrid["logits"], outputs(original, feed)["logits"], atol=1e-2)
    restored = load_file(latte_convert.restore(out, tmp_path / "original") / "model.safetensors")
    assert restored.keys() == source.keys()
    assert all(torch.equal(restored[key], tensor) for key, tensor in source.items())


def test_refitting_keeps_the_kernels(chosen, scenes):
    refit = convert(scenes, ratio=1.0, propagate_error=True, include=("layers.2",))
    kernels = {site.name: site.fit.kernel for site in refit.report.sites if site.converted}
    assert set(kernels.values()) == {"latte", "near_far"}
    assert dict(refit.plan.kernels) == kernels == {name: chosen.plan.kernels[name] for name in kernels}


@pytest.mark.parametrize("most", [0.6, 0.2])
def test_max_flops_is_kept(scenes, most):
    result = convert(scenes, max_flops=most)
    flops = result.report.cost.flops
    # 4·N²·D multiply-adds, times 2, in three layers of each kind with D = 128 channels.
    assert flops.original == 3 * 4 * 128 * (ENCODER**2 + QUERIES**2 + QUERIES * ENCODER)
    share = flops_share(result)
    assert share <= most
    assert flops.hybrid / flops.original == pytest.approx(share)
    for name in result.report.converted:  # on nine object queries near_far is softmax: no error, and nothing saved
        assert result.model.get_submodule(name).latte.flops(shape(name)) < softmax_flops(shape(name))
    points = result.report.frontier
    picked = next(point for point in points if point.chosen)
    assert picked.flops_share == pytest.approx(share)
    assert picked.converted == len(result.report.converted)
    within = [point for point in points if point.flops_share <= most]
    assert picked.predicted_error == min(point.predicted_error for point in within)
    assert len(within) < len(points), "the budget must rule something out for this test to mean anything"


def test_sites_that_are_too_short_to_gain_are_named(scenes):
    recipe = Recipe(options=SMALL, samples=4, ratio=1.0)
    report = latte_convert.convert(DETR, scenes, recipe=recipe).report
    short = {site.name for site in report.sites if ".decoder." in site.name and site.name.endswith("self_attn")}
    assert len(short) == 3
    assert set(report.converted) == {site.name for site in report.sites} - short
    assert [text for text in report.warnings if text.startswith("9 sites were asked for, 6 are converted")]


def test_a_site_that_ruins_the_model_is_converted_only_where_it_is_asked_for(scenes):
    first = "model.encoder.layers.0.self_attn"
    recipe = {"options": SMALL, "samples": 4, "include": ("encoder.layers",)}
    report = latte_convert.convert(DETR, scenes, recipe=Recipe(**recipe)).report
    values = {site.name: site.score.value for site in report.sites if site.eligible}
    assert values[first] > 0.1 > min(values.values())
    assert set(report.converted) == {name for name, value in values.items() if value <= 0.1}
    report = latte_convert.convert(DETR, scenes, recipe=Recipe(**recipe, ratio=1.0)).report
    assert first in report.converted
    assert [text for text in report.warnings if text.startswith(first) and "--exclude" in text]


def test_a_site_where_near_far_is_softmax_is_not_converted(scenes):
    recipe = Recipe(options=SMALL, samples=4, k=4, include=("decoder",))
    report = latte_convert.convert(DETR, scenes, recipe=recipe).report
    cross = {site.name for site in report.sites if site.eligible and site.name.endswith("encoder_attn")}
    assert len(cross) == 3
    assert cross == set(report.converted)  # though self-attention on nine object queries scores 0
    assert [text for text in report.warnings if text.startswith("4 sites were asked for, 3 are converted")]
    assert all(site.score.value == 0 for site in report.sites if site.eligible and site.name not in cross)


def test_a_lower_min_fidelity_converts_more(scenes):
    strict, lax = (convert(scenes, min_fidelity=least, include=("encoder.layers",)) for least in (0.98, 0.9))
    assert len(lax.report.converted) > len(strict.report.converted) > 0
    assert flops_share(lax) < flops_share(strict) < 1
    for result, least in ((strict, 0.98), (lax, 0.9)):
        outputs = result.report.fidelity.outputs
        assert min(outputs[name].likeness for name in ("logits", "pred_boxes")) >= least
        assert outputs["pred_boxes"].agreed < outputs["pred_boxes"].cosine  # what a cosine of coordinates does not see


def test_greedy_converts_what_is_asked_and_measures_it(scenes):
    result = convert(scenes, samples=6, scorer="greedy", k=2, include=("encoder.layers",))
    report = result.report
    robust = min((site for site in report.sites if site.eligible), key=lambda site: site.score.value)
    assert len(report.converted) == 2
    assert robust.name in report.converted
    point = next(point for point in report.frontier if point.chosen)
    assert sum(point.kernels.values()) == 2
    feed = list(result.task.fitting)
    assert len(feed) == 4
    original, _ = train_tiny_detr.load(DETR)
    before, after = outputs(original, feed), outputs(result.model, feed)
    cosine, errors = {}, {}
    for name in before:
        tokens = before[name].reshape(-1, before[name].shape[-1]).double()
        changed = after[name].reshape(tokens.shape).double()
        cosine[name] = float(torch.nn.functional.cosine_similarity(tokens, changed, dim=-1).mean())
        errors[name] = float((tokens - changed).square().sum() / (tokens - tokens.mean(0)).square().sum())
    assert point.cosine == pytest.approx(min(cosine.values()), abs=1e-5)
    assert point.predicted_error == pytest.approx(sum(errors.values()), rel=1e-2)


def test_no_budget_gets_the_default_kernel_in_two_thirds_of_the_sites(scenes):
    result = latte_convert.convert(DETR, scenes, recipe=Recipe(samples=4))
    assert set(result.plan.kernels.values()) == {"near_far"}
    assert all(site.score.value <= 0.1 for site in result.report.sites if site.converted)
    assert result.report.recipe["scorer"] == "isolated"


def test_a_budget_that_one_plan_alone_misses(scenes):
    """The default kernel saves little on so few tokens."""
    with pytest.raises(
        GateError, match=r"at most 50% .* nearest: [1-9] sites converted \([1-9] x near_far\), \d\d\.\d%"
    ):
        latte_convert.convert(DETR, scenes, recipe=Recipe(samples=4, max_flops=0.5))


def test_budgets_out_of_reach(scenes):
    with pytest.raises(GateError, match=r"at most 5% of the exact attention FLOPs; the nearest: 3 sites converted"):
        convert(scenes, max_flops=0.05, include=("encoder.layers",))
    with pytest.raises(GateError, match=r"keeps a fidelity of 1 .* nearest has a likeness of 0\.9\d\d\d:"):
        convert(scenes, min_fidelity=1.0, include=("encoder.layers",))


def test_a_speed_out_of_reach_exits_4_and_writes_nothing(scenes, tmp_path, latte):
    recipe = tmp_path / "auto.yaml"
    settings = {"kernel": "auto", "samples": 4, "include": ["encoder.layers"], "target_speedup": 50}
    recipe.write_text(yaml.safe_dump({**settings, "candidates": [each.model_dump() for each in BOTH]}))
    code, out, err = latte("convert", DETR, "--calib", scenes, "-c", recipe, "--out", tmp_path / "hybrid")
    assert (code, out) == (4, "")
    last = err.splitlines()[-1]
    assert "no plan is 50 times as fast as the original; the nearest reaches" in last
    assert "sites converted (" in last
    assert [path.name for path in tmp_path.iterdir()] == ["auto.yaml"]


def test_causal_sites_are_left_to_kernels_with_a_causal_form(pairs):
    near = Recipe(kernel="near_far", samples=4)
    report = latte_convert.score(CLIP, list(pairs), recipe=near)
    text = [site for site in report.sites if site.tower == "text"]
    assert text
    assert all(site.causal and not site.eligible for site in text)
    assert {site.reason for site in text} == {"kernel 'near_far' has no causal form"}
    assert {site.tower for site in report.sites if site.eligible} == {"vision"}

    both = Recipe(kernel="auto", candidates=BOTH[::-1], samples=4, ratio=1.0)
    result = latte_convert.convert(CLIP, list(pairs), recipe=both)
    kernels = {tower: set() for tower in ("vision", "text")}
    for site in result.plan.converted:
        kernels[site.tower].add(result.plan.kernels[site.name])
    assert kernels["text"] == {"latte"}
    assert "near_far" in kernels["vision"]


def test_no_site_is_left(pairs):
    with pytest.raises(CheckpointError) as error:
        latte_convert.score(CLIP, pairs[1], recipe=Recipe(samples=4))
    assert error.value.exit_code == 3
    assert str(error.value) == (
        "no attention site can be converted: kernel 'near_far' has no causal form; no samples reach the vision tower."
    )
