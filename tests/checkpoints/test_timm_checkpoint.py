"""timm checkpoints: found, loaded strictly, converted, and read back from an artifact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm_models import CHECKPOINTS, PATCHED, create, sharp, write

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.samples import Sample, open_samples
from latte_convert.errors import CheckpointError, DataError, IntegrityError, RecipeError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("timm") / "tiny-vit")


def test_the_checkpoint_says_what_it_is(source: Path) -> None:
    for name in (str(source), f"timm:local-dir:{source}", str(source / "model.safetensors")):
        found = resolve(name)
        assert (found.library, found.model_class, found.modalities) == ("timm", "VisionTransformer", ("image",))
        assert found.path == source
        assert found.sidecars() == ["config.json"]


def test_it_loads_as_timm_loads_it(source: Path) -> None:
    checkpoint = resolve(source)
    model, unexpected = checkpoint.instantiate(checkpoint.read_tensors())
    expected = timm.create_model(f"local-dir:{source}", pretrained=True).eval()
    x = torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert unexpected == []
    assert not model.training


def test_preprocessing_is_the_checkpoints_own(source: Path, photos: Path) -> None:
    checkpoint = resolve(source)
    model, _ = checkpoint.instantiate(checkpoint.read_tensors())
    sample = next(iter(open_samples(photos, "image", samples=1, seed=0)))
    # timm's own, as a tuple however JSON or timm's parser left it.
    config = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{source}"))
    config = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    assert (config["input_size"], config["mean"], config["crop_pct"]) == ((3, 56, 56), (0.4, 0.5, 0.6), 0.9)
    expected = timm.data.create_transform(**config, is_training=False)(sample.value)
    prepared = checkpoint.processor("image").prepare(sample, model)
    assert list(prepared) == ["x"]
    assert torch.equal(prepared["x"], expected[None])


def test_grey_models_get_grey_images(tmp_path: Path) -> None:
    model = create("vit_tiny_patch16_224", **PATCHED, in_chans=1)
    save_for_hf(model, str(tmp_path), safe_serialization=True, data_config={"mean": (0.5,), "std": (0.5,)})
    checkpoint = resolve(tmp_path)
    image = Image.new("RGB", (80, 60), (255, 0, 0))
    (pixels,) = checkpoint.processor("image").prepare(Sample(id="red", sha256="", value=image), model).values()
    assert pixels.shape == (1, 1, 56, 56)
    # Red is 0.299 of luminance: (76 / 255 - 0.5) / 0.5.
    torch.testing.assert_close(pixels.mean(), torch.tensor((76 / 255 - 0.5) / 0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_round_trip(name: str, photos: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", name)
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=6, k=1))
    assert (result.report.source.library, list(result.report.fidelity.outputs)) == ("timm", ["output"])
    out = result.save(tmp_path / "hybrid")
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    hybrid = latte_convert.load(out)
    assert type(hybrid) is type(result.model)
    x = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        assert torch.equal(hybrid(x), result.model(x))
    assert latte_convert.verify(out).probe_difference < 1e-6
    restored = latte_convert.restore(out, tmp_path / "restored")
    original, again = load_file(source / "model.safetensors"), load_file(restored / "model.safetensors")
    assert original.keys() == again.keys()
    assert all(torch.equal(original[key], again[key]) for key in original)
    with torch.no_grad():  # timm itself reads it
        before, after = (timm.create_model(f"local-dir:{p}", pretrained=True).eval()(x) for p in (source, restored))
        assert torch.equal(before, after)


def test_bf16_keeps_its_dtype(photos: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", dtype=torch.bfloat16)
    out = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4)).save(tmp_path / "hybrid")
    hybrid = latte_convert.load(out)
    assert {p.dtype for name, p in hybrid.named_parameters() if ".latte." not in name} == {torch.bfloat16}
    assert latte_convert.verify(out).probe_difference < 1e-6


def test_a_model_in_memory_converts_and_saves(source: Path, tmp_path: Path) -> None:
    model = timm.create_model(f"local-dir:{source}", pretrained=True)
    batches = [{"x": torch.randn(1, 3, 56, 56)} for _ in range(4)]
    result = latte_convert.convert(model, batches, recipe=Recipe(kernel="latte", ratio=1))
    assert result.report.source.library == "timm"
    assert sorted(site.name for site in result.plan.converted) == ["blocks.0.attn", "blocks.1.attn"]
    hybrid = latte_convert.load(result.save(tmp_path / "hybrid"))
    with torch.no_grad():
        assert torch.equal(hybrid(batches[0]["x"]), result.model(batches[0]["x"]))
    restored = load_file(latte_convert.restore(tmp_path / "hybrid", tmp_path / "restored") / "model.safetensors")
    original = load_file(source / "model.safetensors")
    assert restored.keys() == original.keys()
    assert all(torch.equal(restored[key], original[key]) for key in original)


def test_a_model_that_timm_cannot_rebuild_is_refused() -> None:
    batches = [{"x": torch.randn(1, 3, 56, 56)} for _ in range(3)]
    changed = create("vit_tiny_patch16_224", **PATCHED)
    changed.head = torch.nn.Linear(48, 9)
    with pytest.raises(CheckpointError, match=r"2 of another shape \(head\.bias, head\.weight\)"):
        latte_convert.convert(changed, batches, recipe=Recipe(kernel="latte", k=1))


def test_another_layout_goes_through_timms_own_filter(photos: Path, tmp_path: Path) -> None:
    """DINOv2's own names for its tensors: the artifact keeps them."""
    source = write(tmp_path / "source", "registers")
    tensors = load_file(source / "model.safetensors")
    released = {key.replace("reg_token", "register_tokens"): tensor for key, tensor in tensors.items()}
    released["mask_token"] = torch.zeros(1, 48)  # what tells this layout, and has no place in timm
    position = tensors["pos_embed"]
    assert position.shape[1] == 16  # without the class token, which the release has
    released["pos_embed"] = torch.cat([torch.zeros(1, 1, 48), position], dim=1)
    save_file(released, source / "model.safetensors")
    out = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4)).save(tmp_path / "hybrid")
    assert {key for key in load_file(out / "model.safetensors") if ".latte." not in key} == released.keys()
    model = latte_convert.load(out)
    assert torch.equal(model.state_dict()["reg_token"], tensors["reg_token"])
    assert latte_convert.verify(out).probe_difference < 1e-6
    restored = load_file(latte_convert.restore(out, tmp_path / "restored") / "model.safetensors")
    assert all(torch.equal(restored[key], tensor) for key, tensor in released.items())


def _edit(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def _tensors(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def _pickle(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


BROKEN: dict[str, tuple[Any, str]] = {
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "has no model.safetensors"),
    "damaged weights": (lambda p: (p / "model.safetensors").write_bytes(b"damaged"), "is damaged"),
    "a pickle": (_pickle, "allow-pickle"),
    "no data configuration": (
        lambda p: _edit(p, lambda c: [c["pretrained_cfg"].pop(key) for key in ("mean", "std")]),
        "add mean, std to pretrained_cfg",
    ),
    "no image": (
        lambda p: _edit(p, lambda c: c["pretrained_cfg"].update(input_size=[5, 56, 56])),
        "images of 5 channels",
    ),
    "odd data configuration": (
        lambda p: _edit(p, lambda c: c["pretrained_cfg"].update(crop_mode=3, interpolation="cubist")),
        "timm cannot use its data configuration",
    ),
    "unknown architecture": (
        lambda p: _edit(p, lambda c: c.update(architecture="vit_tiny_patch61_224")),
        "does not know the architecture 'vit_tiny_patch61_224' (nearest: vit_tiny_patch16_224",
    ),
    "unknown argument": (
        lambda p: _edit(p, lambda c: c["model_args"].update(heads_of_cattle=3)),
        "timm cannot build vit_tiny_patch16_224 from its config.json",
    ),
    "a missing tensor": (lambda p: _tensors(p, lambda t: t.pop("norm.weight")), "1 tensors missing (norm.weight)"),
    "another shape": (
        lambda p: _tensors(p, lambda t: t.update({"head.bias": torch.zeros(7)})),
        "1 tensors of another shape (head.bias)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(case: str, source: Path, photos: Path, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    broken = shutil.copytree(source, tmp_path / "broken")
    change(broken)
    with pytest.raises(CheckpointError) as raised:
        latte_convert.convert(broken, photos, recipe=Recipe(kernel="latte", samples=4))
    assert message in str(raised.value)


def test_a_pickle_is_read_where_allowed(source: Path, tmp_path: Path) -> None:
    pickled = shutil.copytree(source, tmp_path / "pickled")
    _pickle(pickled)
    checkpoint = resolve(f"timm:local-dir:{pickled}", allow_pickle=True)
    model, _ = checkpoint.instantiate(checkpoint.read_tensors())
    assert type(model).__name__ == "VisionTransformer"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:vit_smal_patch16_224", "has no model 'vit_smal_patch16_224' (nearest: vit_small_patch16_224"),
        ("timm:vit_small_patch14_dinov2.lvd241m", "(nearest: vit_small_patch14_dinov2.lvd142m"),
        ("timm:vit_small", "(nearest: vit_small_"),
        ("timm:vit_small_patch14_dinov2.lvd142m", "the Hub cannot be reached (offline?)"),
        ("timm:vit_small_patch14_dinov2", "timm:local-dir:PATH"),
        ("timm:hf-hub:someone/some-model", "the Hub cannot be reached (offline?)"),
        ("timm:vit_base_patch16_plus_240", "has no weights on the Hub"),
        ("timm:local-dir:nowhere/at-all", "there is no timm model at 'nowhere/at-all'"),
    ],
)
def test_names_that_cannot_be_had(name: str, message: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        resolve(name)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "resolution", "prefix", "dtype"),
    [
        ("vit", 112, 1, torch.float32),
        ("vit", 28, 1, torch.bfloat16),
        ("registers", 84, 5, torch.float32),
        ("eva02", 112, 1, torch.float32),
        ("rope", 112, 1, torch.float32),
    ],
)
def test_another_resolution(
    name: str, resolution: int, prefix: int, dtype: torch.dtype, photos: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", name, dtype)
    result = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=6, k=1, resolution=resolution))
    tokens = {result.report.cost.tokens[site] for site in result.report.converted}
    assert tokens == {prefix + (resolution // 14) ** 2}
    out = result.save(tmp_path / "hybrid")
    x = torch.randn(2, 3, resolution, resolution).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(latte_convert.load(out)(x), result.model(x), rtol=1e-5, atol=1e-5)
    assert latte_convert.verify(out).probe_difference < 1e-5
    before, hybrid = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {key for key in hybrid if ".latte." not in key} == before.keys()
    restored = load_file(latte_convert.restore(out, tmp_path / "restored") / "model.safetensors")
    assert restored.keys() == before.keys()
    assert all(torch.equal(before[key], other[key]) for key in before for other in (hybrid, restored))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("option", [{"img_size": 112}, {"dynamic_img_size": True}], ids=["at load", "in forward"])
def test_another_resolution_is_as_timm_has_it(name: str, option: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    checkpoint = resolve(write(tmp_path / "source", name))
    model, unexpected = checkpoint.instantiate(checkpoint.read_tensors(), 112)
    assert unexpected == []
    sample = next(iter(open_samples(photos, "image", samples=1, seed=0)))
    (pixels,) = checkpoint.processor_at("image", 112).prepare(sample, model).values()
    assert pixels.shape == (1, 3, 112, 112)
    expected = timm.create_model(f"local-dir:{checkpoint.path}", pretrained=True, **option).eval()
    config = timm.data.resolve_data_config({"img_size": 112}, pretrained_cfg=expected.pretrained_cfg)
    assert torch.equal(pixels, timm.data.create_transform(**config, is_training=False)(sample.value)[None])
    with torch.no_grad():
        torch.testing.assert_close(model(pixels), expected(pixels), rtol=1e-5, atol=1e-5)


def test_a_pyramid_takes_any_resolution(photos: Path, tmp_path: Path) -> None:
    """Its positions are convolutions; timm has nothing to interpolate."""
    model = sharp(create("pvt_v2_b0", num_classes=5, depths=(1, 1, 1, 1)))
    save_for_hf(model, str(tmp_path / "pvt"), safe_serialization=True)
    result = latte_convert.convert(
        tmp_path / "pvt", photos, recipe=Recipe(kernel="latte", samples=4, k=1, resolution=96)
    )
    assert latte_convert.verify(result.save(tmp_path / "hybrid")).probe_difference < 1e-5


def test_resolutions_that_cannot_be(source: Path, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="100 is not a multiple of the model's patch size 14; nearest: 98"):
        latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4, resolution=100))
    hiera = create("hiera_tiny_224", img_size=64, num_classes=5, embed_dim=24, stages=(1, 1, 1, 1))
    save_for_hf(hiera, str(tmp_path / "hiera"), safe_serialization=True, model_config={"input_size": (3, 64, 64)})
    with pytest.raises(CheckpointError, match="timm runs Hiera at its own resolution 64 only; leave out --resolution"):
        latte_convert.convert(tmp_path / "hiera", photos, recipe=Recipe(kernel="latte", samples=4, resolution=128))
    batches = [{"x": torch.randn(1, 3, 64, 64)} for _ in range(3)]
    with pytest.raises(RecipeError, match="ready batches have their size already"):
        latte_convert.convert(hiera, batches, recipe=Recipe(kernel="latte", resolution=64))


@pytest.mark.parametrize(
    ("value", "message"), [("112", "no number of pixels"), (-14, "no number of pixels"), (100, "nearest: 98")]
)
def test_a_changed_resolution_is_found(value: Any, message: str, source: Path, photos: Path, tmp_path: Path) -> None:
    out = latte_convert.convert(source, photos, recipe=Recipe(kernel="latte", samples=4, resolution=112)).save(
        tmp_path / "hybrid"
    )
    manifest = json.loads((out / "latte.json").read_text())
    assert manifest["recipe"]["resolution"] == 112
    manifest["recipe"]["resolution"] = value
    (out / "latte.json").write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match=message):
        latte_convert.load(out)


def test_text_is_no_data_for_an_image_model(source: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one sentence\nand another\n")
    with pytest.raises(DataError, match="image"):
        latte_convert.convert(source, tmp_path, recipe=Recipe(kernel="latte", samples=2))


def test_a_model_without_a_convertible_site(photos: Path, tmp_path: Path) -> None:
    model = create("swin_tiny_patch4_window7_224", depths=(1, 1), embed_dim=12, num_heads=(1, 2), num_classes=3)
    save_for_hf(model, str(tmp_path / "swin"), safe_serialization=True)
    with pytest.raises(CheckpointError, match="no attention site can be converted: windowed attention"):
        latte_convert.convert(tmp_path / "swin", photos, recipe=Recipe(kernel="latte", samples=4))


def test_command_line(source: Path, photos: Path, tmp_path: Path, latte: Any) -> None:
    out = tmp_path / "hybrid"
    name = f"timm:local-dir:{source}"
    code, stdout, _ = latte("convert", name, "--calib", photos, "--samples", 4, "--kernel", "latte", "--out", out)
    assert (code, stdout) == (0, f"{out}\n")
    code, stdout, _ = latte("verify", out, "--json")
    assert (code, json.loads(stdout)["ok"]) == (0, True)
    code, stdout, _ = latte("score", name, "--calib", photos, "--samples", 4)
    assert code == 0
    code, stdout, stderr = latte("convert", "timm:vit_smal", "--calib", photos, "--out", tmp_path / "none")
    assert (code, stdout) == (3, "")
    assert "has no model 'vit_smal' (nearest: vit_small_patch8_224" in " ".join(stderr.split())
