"""A whole benchmark on small models of the real classes. Times are measured, but nothing is asserted of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from bench.artifacts import EVERY_SECOND, make_artifact

import latte_convert
from latte_convert.adapters.host import Host
from latte_convert.artifact.load import open_artifact
from latte_convert.artifact.manifest import read_manifest
from latte_convert.artifact.verify import verify
from latte_convert.bench import measure, run, store, variants
from latte_convert.bench.inputs import Case, make_cases
from latte_convert.bench.result import BenchReport
from latte_convert.bench.run import bench
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.feed import Inputs
from latte_convert.errors import CheckpointError, DataError, IntegrityError, UsageError
from latte_convert.kernels.near_far.kernel import NearFarKernel
from latte_convert.measuring.outputs import named_outputs
from latte_convert.progress import silent

pytestmark = pytest.mark.slow

MODELS = Path(__file__).resolve().parents[1] / "models"


@pytest.fixture(scope="module")
def dino(tiny_dino: Path, photos: Path, tmp_path_factory) -> Path:
    return make_artifact(tiny_dino, photos, tmp_path_factory.mktemp("bench") / "dino", EVERY_SECOND)


@pytest.fixture(scope="module")
def clip(tiny_clip: Path, sentences: Path, tmp_path_factory) -> Path:
    return make_artifact(tiny_clip, sentences, tmp_path_factory.mktemp("bench") / "clip")


@pytest.fixture(scope="module")
def report(dino: Path, photos: Path) -> BenchReport:
    return bench(dino, resolutions=[84, 56], data=str(photos), compile=False, rounds=2)


@pytest.fixture
def copy(dino: Path, tmp_path: Path) -> Path:
    return shutil.copytree(dino, tmp_path / "dino")


@torch.no_grad()
def cosine(artifact: Path, resolution: int, photos: Path, dtype: torch.dtype = torch.float32) -> float:
    """Mean over samples and tokens, by the libraries' own models."""
    _, [case] = make_cases(open_artifact(artifact), resolutions=[resolution], data=str(photos))
    source = resolve(artifact)
    original, _ = source.instantiate(source.original_tensors())
    a, b = (
        torch.cat([model.to(dtype)(**inputs.kwargs).last_hidden_state.double() for inputs in case.inputs])
        for model in (original, latte_convert.load(artifact))
    )
    return torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item()


def test_lengths_are_sorted_and_tokens_derived(report):
    assert [(r.label, r.resolution, r.tokens, r.sites) for r in report.lengths] == [
        ("56 px", 56, 17, 3),  # 4 x 4 patches of 14, and CLS; every second of six layers
        ("84 px", 84, 37, 3),
    ]
    assert (report.modality, report.device, report.dtype) == ("image", "cpu", "float32")


def test_the_report_is_strict_json_and_comes_back(report):
    text = json.dumps(report.model_dump(mode="json"), allow_nan=False)
    assert BenchReport.model_validate_json(text) == report


def test_flops_of_the_original_are_those_of_its_formula(report):
    for length in report.lengths:
        flops = length.variant("original").flops
        # Three sites, two products of N x N x 48 channels, 2 FLOPs per multiply-add.
        assert flops.formula == flops.measured == 3 * 2 * 2 * length.tokens**2 * 48


def test_flops_of_the_hybrid_differ_by_the_plain_sum_over_values(report):
    for length in report.lengths:
        flops = length.variant("hybrid").flops
        # Of 3 heads of 16 and one more feature: keys times values, and patches times that. CLS attends exactly.
        keys, patches, cls = length.tokens * 16 * 17, (length.tokens - 1) * 16 * 17, 2 * length.tokens * 16
        assert flops.formula == 3 * 3 * 2 * (keys + patches + cls)
        assert flops.measured - flops.formula == 3 * 2 * length.tokens * 48


def test_the_original_is_the_measure_of_the_others(dino, photos, report):
    for length in report.lengths:
        original, hybrid = length.variant("original"), length.variant("hybrid")
        assert (original.forward_ratio, original.attention_ratio, original.cosine) == (1.0, 1.0, None)
        assert original.detail.startswith("SDPA: ")
        assert hybrid.cosine == pytest.approx(cosine(dino, length.resolution, photos), abs=1e-5)
        assert length.variant("hybrid_compiled") is None


def test_every_variant_is_measured_or_says_why_not(report):
    for length in report.lengths:
        assert [v.name for v in length.variants] == ["original", "hybrid", "pooled", "merged"]
        for variant in length.variants:
            assert (variant.forward is None) == (variant.reason is not None)


def test_memory_of_a_forward_holds_at_least_the_mlp(report):
    for length in report.lengths:
        hidden = length.tokens * 2 * 48 * 4  # mlp_ratio 2, 48 channels, float32
        assert length.variant("original").forward_memory_bytes >= hidden
        # Queries, keys and values are inputs of the attention; its output of 48 channels is not.
        assert length.variant("original").attention_memory_bytes >= length.tokens * 48 * 4


def test_the_model_is_left_as_it_was(dino):
    artifact = open_artifact(dino)
    _, [case] = make_cases(artifact, resolutions=[56])
    before = measure._primary(case, case.inputs[0])
    settings = measure.Settings(
        torch.device("cpu"), compile=False, rounds=1, progress=lambda *_: lambda: None, real=True
    )
    measure.measure_case(case, artifact.kernels, settings)
    with torch.no_grad():
        assert torch.equal(measure._primary(case, case.inputs[0]), before)


def test_a_compiler_that_fails_says_so_in_its_row(dino, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("no C++ compiler\nlong trace")

    monkeypatch.setattr(variants.torch, "compile", broken)
    [length] = bench(dino, resolutions=[56], rounds=1).lengths
    compiled = length.variant("hybrid_compiled")
    assert compiled.reason == "no C++ compiler"
    assert compiled.forward is None
    assert length.variant("hybrid").forward is not None


def test_compiled_kernels_are_timed_as_the_hybrid_they_are(dino, photos, monkeypatch):
    monkeypatch.setattr(variants.torch, "compile", lambda kernel, **_: kernel)
    [length] = bench(dino, resolutions=[56], data=str(photos), rounds=1).lengths
    compiled = length.variant("hybrid_compiled")
    assert compiled.cosine == pytest.approx(length.variant("hybrid").cosine, abs=1e-6)
    assert compiled.forward is not None
    assert compiled.attention is not None


def test_synthetic_inputs_have_no_cosine(dino):
    [length] = bench(dino, resolutions=[56], compile=False, rounds=1).lengths
    assert [variant.cosine for variant in length.variants] == [None] * len(length.variants)
    assert length.variant("hybrid").forward is not None


def test_finished_lengths_outlive_an_interrupt(dino, monkeypatch):
    def interrupted(case, *rest):
        if case.resolution == 84:
            raise KeyboardInterrupt
        return measure.measure_case(case, *rest)

    monkeypatch.setattr(run, "measure_case", interrupted)
    report = bench(dino, resolutions=[56, 84], compile=False, rounds=1)
    assert [length.resolution for length in report.lengths] == [56]
    assert report.statements[-1] == "interrupted: not measured at 84 px"
    with pytest.raises(KeyboardInterrupt):
        bench(dino, resolutions=[84], compile=False, rounds=1)


def test_weights_can_be_cast(dino, photos):
    report = bench(dino, resolutions=[56], data=str(photos), compile=False, rounds=1, dtype=torch.bfloat16)
    assert report.dtype == "bfloat16"
    exact = cosine(dino, 56, photos)
    assert report.lengths[0].variant("hybrid").cosine == pytest.approx(exact, abs=0.01)
    assert exact < 0.9


def test_rivals_that_run_are_timed(tiny_dino, photos, tmp_path):
    """At 17 x 17 patches pooling saves operations; whether tokens are merged depends on which is faster."""
    path = make_artifact(tiny_dino, photos, tmp_path / "dino", EVERY_SECOND)
    [length] = bench(path, resolutions=[238], compile=False, rounds=1).lengths
    pooled = length.variant("pooled")
    assert pooled.reason is None
    assert pooled.forward is not None
    # 9 x 9 cells and the prefix instead of 290 keys: some more than 82 / 290 of the operations.
    exact = length.variant("original").flops.formula
    assert 82 / 290 < pooled.flops.formula / exact < 0.5
    assert pooled.flops.measured == pytest.approx(pooled.flops.formula, rel=0.02)


def test_default_lengths_are_whole_patches_around_the_models_own(dino):
    modality, cases = make_cases(open_artifact(dino))
    assert modality == "image"
    assert [case.resolution for case in cases] == [28, 42, 56, 70]  # 56 times 0.5, 0.75, 1, 1.25


def test_texts_are_cut_to_length_and_keep_their_end(clip):
    artifact = open_artifact(clip)
    modality, cases = make_cases(artifact, tokens=[12, 5])
    assert modality == "text"
    ids = [case.inputs[0].kwargs["input_ids"] for case in cases]
    assert [tuple(i.shape) for i in ids] == [(1, 5), (1, 12)]
    assert all(i[0, 0] == 1 and i[0, -1] == 2 for i in ids)  # <bos>, <eos>
    assert cases[0].inputs[0].method == "get_text_features"
    assert [c.label for c in make_cases(artifact, tokens=[24])[1]] == ["24 tokens"]


def test_a_tower_is_measured_on_its_own(clip):
    [length] = bench(clip, tokens=[8], compile=False, rounds=1).lengths
    assert (length.tokens, length.sites) == (8, 3)
    reasons = {v.name: v.reason for v in length.variants}
    assert reasons["original"] is None
    assert "vision towers only" in reasons["merged"]


def test_a_detector_is_measured_with_its_cross_attention(photos, tmp_path):
    path = make_artifact(MODELS / "tiny-detr", photos, tmp_path / "detr")
    [length] = bench(path, resolutions=[64], compile=False, rounds=1).lengths
    assert length.sites == len(read_manifest(path).sites)
    assert length.variant("hybrid").forward is not None


@torch.no_grad()
def test_a_kernel_that_leaves_the_graph_for_padding_is_not_timed_as_compiled():
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        )
    ).eval()
    text = {"input_ids": torch.randint(1, 50, (1, 120)), "attention_mask": torch.ones(1, 120).long()}
    text["attention_mask"][:, 100:] = 0
    host = Host.of(model)
    kernels = {site.name: NearFarKernel(4, 8, window=2, halo=1, clusters=8) for site in host.sites()}
    settings = measure.Settings(torch.device("cpu"), compile=True, rounds=1, progress=silent, real=True)
    length = measure.measure_case(Case("padded", None, host, [Inputs(text)]), kernels, settings)
    compiled = length.variant("hybrid_compiled")
    assert compiled.reason == "near_far leaves a compiled graph where a call has a padding mask, as these inputs do"
    assert compiled.forward is None
    assert length.variant("hybrid").forward is not None


def test_real_samples_take_the_place_of_synthetic_ones(dino, photos):
    data = str(photos)
    _, [case] = make_cases(open_artifact(dino), resolutions=[56], data=data)
    assert len(case.inputs) == 4
    assert len({inputs.kwargs["pixel_values"].sum().item() for inputs in case.inputs}) == 4


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        ({"resolutions": [60]}, CheckpointError, "not a multiple of the model's patch size 14; nearest: 56"),
        ({"tokens": [20]}, UsageError, "give --resolutions"),
        ({"tokens": [20], "resolutions": [56]}, UsageError, "give one of them"),
        ({"rounds": 0}, UsageError, "rounds"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(dino, lengths, error, match):
    with pytest.raises(error, match=match):
        bench(dino, **lengths)


def test_more_tokens_than_the_model_takes_name_the_maximum(clip):
    with pytest.raises(DataError, match="25 tokens are more than the model takes: its maximum is 24"):
        bench(clip, tokens=[8, 25])
    with pytest.raises(UsageError, match="--tokens takes at most 1,000,000"):
        bench(clip, tokens=[8, 10**14])
    with pytest.raises(DataError, match="at least 3"):
        bench(clip, tokens=[2])


def test_a_tower_without_converted_sites_is_refused(tiny_clip, sentences, tmp_path):
    path = make_artifact(tiny_clip, sentences, tmp_path / "clip")  # of the text tower
    with pytest.raises(CheckpointError, match="reach no converted site"):
        bench(path, resolutions=[48], compile=False, rounds=1)
    assert make_cases(open_artifact(path))[0] == "text"  # by default, what reaches the converted tower


def test_writing_min_tokens_keeps_the_artifact_sound(copy):
    before = read_manifest(copy)
    store.write_min_tokens(copy, 30)
    after = read_manifest(copy)
    assert after.min_tokens == 30
    assert after.model_copy(update={"min_tokens": 0, "probe": before.probe}) == before
    # The probe has 17 tokens, below 30: the hybrid answers it as the original does now.
    assert after.probe.values != before.probe.values
    assert verify(copy).probe_difference == 0
    assert [p.name for p in copy.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(("resolution", "identical"), [(56, True), (84, False)])
def test_below_min_tokens_the_hybrid_is_the_original_bit_by_bit(copy, resolution, identical):
    store.write_min_tokens(copy, 30)  # 17 tokens at 56 pixels, 37 at 84
    source = resolve(copy)
    original, _ = source.instantiate(source.original_tensors())
    pixels = torch.randn(1, 3, resolution, resolution, generator=torch.Generator().manual_seed(1))
    hybrid = latte_convert.load(copy)
    with torch.no_grad():
        exact = dict(named_outputs(original(pixels, interpolate_pos_encoding=True)))
        ours = dict(named_outputs(hybrid(pixels, interpolate_pos_encoding=True)))
    assert all(torch.equal(exact[name], ours[name]) for name in exact) == identical


def test_the_guard_sees_what_is_identical(dino):
    artifact = open_artifact(dino)
    _, [case] = make_cases(artifact, resolutions=[56])
    settings = measure.Settings(torch.device("cpu"), compile=False, rounds=1, progress=silent, real=False)
    assert measure.measure_guard(case, 17, artifact.kernels, 18, settings).identical
    assert not measure.measure_guard(case, 17, artifact.kernels, 17, settings).identical


def test_nothing_is_written_into_a_damaged_artifact(copy):
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    manifest = (copy / "latte.json").read_bytes()
    with pytest.raises(IntegrityError, match=r"config\.json"):
        store.write_min_tokens(copy, 30)
    assert (copy / "latte.json").read_bytes() == manifest


def test_the_report_is_saved_beside_the_other(copy, report):
    path = store.save_report(copy, report)
    assert path == copy / "bench.json"
    assert BenchReport.model_validate_json(path.read_text()) == report


def test_a_report_names_its_artifact_whatever_min_tokens_is(copy, report):
    store.write_min_tokens(copy, 30)
    assert read_manifest(copy).fingerprint == report.artifact_fingerprint


def test_a_saved_report_is_no_part_of_the_checkpoint(copy, report):
    store.save_report(copy, report)
    assert verify(copy).files == len(read_manifest(copy).files)
