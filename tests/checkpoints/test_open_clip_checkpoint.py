"""open_clip checkpoints on disk: found, loaded strictly, converted, saved, loaded again and restored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as hf
from open_clip.push_to_hf_hub import save_config_for_hf
from open_clip_models import COCA, PREPROCESS, SIGLIP, TEXT, VISION, build, write
from PIL import Image
from safetensors.torch import load_file, save_file

import latte_convert
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.samples import Sample
from latte_convert.errors import CheckpointError, DataError, IntegrityError, RecipeError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

RECIPE = Recipe(kernel="latte", samples=6, ratio=0.5)


@pytest.mark.parametrize(
    ("name", "cls"),
    [("clip", "CLIP"), ("quick_gelu", "CLIP"), ("custom", "CLIP"), ("coca", "CoCa"), ("siglip", "CustomTextCLIP")],
)
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_convert_save_load_verify_restore(
    name: str, cls: str, tower: str, tmp_path: Path, photos: Path, sentences: Path
) -> None:
    source = write(tmp_path / "source", name)
    result = latte_convert.convert(source, photos if tower == "vision" else sentences, recipe=RECIPE)
    assert {site.tower for site in result.report.sites if site.eligible} == {tower}
    assert result.report.source.library == "open_clip"
    out = result.save(tmp_path / "hybrid")
    assert (out / "open_clip_config.json").read_bytes() == (source / "open_clip_config.json").read_bytes()
    assert sorted(path.name for path in out.glob("*.safetensors*")) == ["open_clip_model.safetensors"]

    assert latte_convert.verify(out).probe_difference < 1e-5
    reloaded: Any = latte_convert.load(out)
    model: Any = result.model
    assert type(reloaded).__name__ == cls == resolve(out).model_class
    assert reloaded.visual.preprocess_cfg["mean"] == PREPROCESS["mean"]
    size = model.visual.image_size[0]
    with torch.no_grad():
        image, text = torch.randn(2, 3, size, size), open_clip.tokenize(["a cat", "two dogs on a mat"], 16)
        torch.testing.assert_close(reloaded.encode_image(image), model.encode_image(image), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(reloaded.encode_text(text), model.encode_text(text), rtol=1e-5, atol=1e-5)
    assert torch.equal(reloaded.logit_scale, model.logit_scale)

    original = latte_convert.restore(out, tmp_path / "original")
    assert sorted(path.name for path in original.iterdir()) == sorted(path.name for path in source.iterdir())
    before, after = (load_file(path / "open_clip_model.safetensors") for path in (source, original))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    # open_clip itself reads what we restored.
    again, _ = open_clip.create_model_from_pretrained(f"local-dir:{original}")
    assert all(torch.equal(before[key], value) for key, value in again.state_dict().items())


def test_both_towers_of_one_model(tmp_path: Path, photos: Path, sentences: Path) -> None:
    source = write(tmp_path / "source")
    result = latte_convert.convert(source, [photos, sentences], recipe=RECIPE)
    assert {site.tower for site in result.report.sites if site.eligible} == {"vision", "text"}
    assert len(result.report.converted) == 2
    assert latte_convert.verify(result.save(tmp_path / "hybrid")).probe_difference < 1e-5


def test_the_command_line_takes_the_scheme(tmp_path: Path, photos: Path, latte: Any) -> None:
    source, out = write(tmp_path / "source"), tmp_path / "hybrid"
    name = f"open_clip:local-dir:{source}"
    assert latte("convert", name, "--calib", photos, "--samples", 6, "--kernel", "latte", "--out", out)[0] == 0
    assert latte_convert.verify(out).files == 2
    code, _, err = latte("convert", "open_clip:ViT-B-32/nothing", "--calib", photos, "--out", tmp_path / "x")
    assert code == 3
    assert "its tags: openai" in " ".join(err.split())


def test_a_tokenizer_of_the_checkpoint(tmp_path: Path, sentences: Path) -> None:
    """SigLIP's text tower, with a Transformers tokenizer beside the configuration."""
    source = write(tmp_path / "source", "siglip")
    config = json.loads((source / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "org/name", "tokenizer_kwargs": {"clean": "canonicalize"}}
    (source / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no usable tokenizer.*org/name, whose files are not beside it"):
        latte_convert.convert(source, sentences, recipe=RECIPE)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "is"]))
    hf.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(source)
    out = latte_convert.convert(source, sentences, recipe=RECIPE).save(tmp_path / "hybrid")
    assert latte_convert.verify(out).probe_difference < 1e-5
    tokens = resolve(out).processor("text").apply(["A man, is!"])  # type: ignore[attr-defined]
    assert tokens.shape == (1, 16)
    assert tokens[0, :4].tolist() == [2, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype, tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source", dtype=dtype)
    result = latte_convert.convert(source, photos, recipe=RECIPE)
    assert {p.dtype for name, p in result.model.named_parameters() if ".latte." not in name} == {dtype}
    latte_convert.verify(result.save(tmp_path / "hybrid"))


def test_mixed_dtypes_become_float32(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    file = source / "open_clip_model.safetensors"
    save_file({k: v.half() if "mlp" in k else v for k, v in load_file(file).items()}, file)
    checkpoint = resolve(source)
    model, _ = checkpoint.instantiate(checkpoint.read_tensors())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_pickles_only_on_request(tmp_path: Path) -> None:
    source = write(tmp_path / "source", weights="open_clip_pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"open_clip_pytorch_model\.bin.*--allow-pickle"):
        resolve(source)
    expected = build("clip").state_dict()
    checkpoint = resolve(source, allow_pickle=True)
    assert all(torch.equal(expected[key], value) for key, value in checkpoint.read_tensors().items())
    training = {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in expected.items()}}
    torch.save(training, source / "open_clip_pytorch_model.bin")
    model, unexpected = checkpoint.instantiate(checkpoint.read_tensors())
    assert not unexpected
    assert all(torch.equal(expected[key], value) for key, value in model.state_dict().items())


def test_sharded_weights(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latte_convert.artifact.tensors.SHARD_SIZE", "1MB")
    out = latte_convert.convert(write(tmp_path / "source"), photos, recipe=RECIPE).save(tmp_path / "hybrid")
    assert (out / "open_clip_model.safetensors.index.json").is_file()
    assert "open_clip_model.safetensors.index.json" not in resolve(out).sidecars()
    assert latte_convert.verify(out).probe_difference < 1e-5


def test_old_keys_of_a_custom_text_tower(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "siglip")
    config = json.loads((source / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["proj_bias"] = False
    (source / "open_clip_config.json").write_text(json.dumps(config))
    tensors = load_file(source / "open_clip_model.safetensors")
    tensors = {key.removeprefix("text."): value for key, value in tensors.items()}
    del tensors["text_projection.bias"]
    tensors["text_projection"] = tensors.pop("text_projection.weight").T.contiguous()
    tensors["logit_scale"] = tensors["logit_scale"].reshape(1)
    save_file(tensors, source / "open_clip_model.safetensors")
    checkpoint = resolve(source)
    model, unexpected = checkpoint.instantiate(checkpoint.read_tensors())
    assert not unexpected
    assert torch.equal(model.text.text_projection, tensors["text_projection"])


def _without(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: _without(t, "visual.proj"), r"1 tensors missing \(visual\.proj\)"),
        (lambda t: {**t, "visual.proj": torch.zeros(3, 4)}, r"1 tensors of another shape \(visual\.proj\)"),
        (lambda t: {f"text_model.{k}": v for k, v in t.items()}, r"\d+ tensors missing \(ln_final.*, …\)"),
    ],
    ids=["missing", "shape", "foreign"],
)
def test_weights_that_do_not_fit(change: Any, message: str, tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source")
    file = source / "open_clip_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(CheckpointError, match=f"does not fill CLIP: {message}"):
        latte_convert.convert(source, photos, recipe=RECIPE)


def test_unexpected_tensors_are_kept(tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source")
    file = source / "open_clip_model.safetensors"
    save_file({**load_file(file), "extra": torch.ones(2)}, file)
    result = latte_convert.convert(source, photos, recipe=RECIPE)
    out = result.save(tmp_path / "hybrid")
    assert torch.equal(load_file(out / "open_clip_model.safetensors")["extra"], torch.ones(2))
    latte_convert.verify(out)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("not json", "not valid JSON"),
        ({"preprocess_cfg": PREPROCESS}, "says nothing of embed_dim, vision_cfg, text_cfg"),
        ({"model_cfg": {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}}, "has no mean and no std"),
        (
            {"model_cfg": {"embed_dim": 16, "vision_cfg": {**VISION, "stride": 2}, "text_cfg": TEXT}}
            | {"preprocess_cfg": PREPROCESS},
            "open_clip cannot build CLIP: .*'stride'",
        ),
        (
            {"model_cfg": {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}}
            | {"preprocess_cfg": {**PREPROCESS, "resize_mode": "stretch"}},
            "no usable preprocess_cfg",
        ),
    ],
    ids=["broken", "empty", "no preprocessing", "unknown setting", "unknown resize"],
)
def test_bad_configurations(config: Any, message: str, tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source")
    text = config if isinstance(config, str) else json.dumps(config)
    (source / "open_clip_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        latte_convert.convert(source, photos, recipe=RECIPE)


@pytest.mark.parametrize("value", [None, "", "a", [], [{}], {"a": 1}], ids=repr)
@pytest.mark.parametrize("section", ["model_cfg", "vision_cfg", "text_cfg", "preprocess_cfg", "mean", "std", "heads"])
def test_settings_of_another_type(section: str, value: Any, tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source")
    config = json.loads((source / "open_clip_config.json").read_text())
    model, preprocessing = config["model_cfg"], config["preprocess_cfg"]
    homes = {"vision_cfg": model, "text_cfg": model, "mean": preprocessing, "std": preprocessing}
    homes.get(section, model["text_cfg"] if section == "heads" else config)[section] = value
    (source / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        latte_convert.convert(source, photos, recipe=RECIPE)


def test_a_share_of_a_head(tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source")
    config = json.loads((source / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["heads"] = 0.5  # open_clip builds it
    (source / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has 0.5 heads of 64.0 channels: the configuration is wrong"):
        latte_convert.convert(source, photos, recipe=RECIPE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-B-23/openai", r"no model 'ViT-B-23' \(nearest: ViT-B-32"),
        ("ViT-B-32/laion3b", r"no weights 'laion3b' for ViT-B-32; its tags: .*laion2b_s34b_b79k"),
        ("ViT-B-32", r"no weights '' for ViT-B-32; its tags: "),
        ("local-dir:/nowhere/there", r"no open_clip model at '/nowhere/there'"),
        ("hf-hub:org/name", r"'org/name'.*the Hub cannot be reached"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(f"open_clip:{name}")


def test_a_tag_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(_settings: Any) -> str:
        raise FileNotFoundError("Failed to download file")

    monkeypatch.setattr("open_clip.pretrained.download_pretrained", offline)
    with pytest.raises(CheckpointError, match=r"cannot be fetched \(offline\?\).*Tags of ViT-B-32: openai, "):
        resolve("open_clip:ViT-B-32/laion2b_s34b_b79k")


def test_a_cached_tag(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration comes from the library, with the activation and preprocessing of the tag."""
    file = write(tmp_path / "source") / "open_clip_model.safetensors"
    config = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
    monkeypatch.setattr("open_clip.get_model_config", lambda name: json.loads(json.dumps(config)))
    monkeypatch.setattr("open_clip.pretrained.download_pretrained", lambda settings: str(file))
    checkpoint: Any = resolve("open_clip:ViT-B-32/openai")
    assert checkpoint.config["model_cfg"]["quick_gelu"] is True
    result = latte_convert.convert("open_clip:ViT-B-32/openai", photos, recipe=RECIPE)
    assert result.report.source.id == "open_clip:ViT-B-32/openai"
    assert type(result.model.visual.transformer.resblocks[0].mlp.gelu).__name__ == "QuickGELU"
    out = result.save(tmp_path / "hybrid")
    assert latte_convert.verify(out).probe_difference < 1e-5
    pickled = tmp_path / "weights.pt"
    pickled.write_bytes(b"")
    monkeypatch.setattr("open_clip.pretrained.download_pretrained", lambda settings: str(pickled))
    with pytest.raises(CheckpointError, match=r"weights\.pt is no safetensors file but a pickle"):
        resolve("open_clip:ViT-B-32/openai")


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    (source / "open_clip_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no open_clip_model\.safetensors"):
        resolve(source)
    (source / "open_clip_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no open_clip_config\.json"):
        resolve(f"open_clip:local-dir:{source}")


def test_both_file_names_are_read(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    file = source / "open_clip_model.safetensors"
    assert [path.name for path in resolve(file).weights] == [file.name]
    shutil.move(file, source / "model.safetensors")
    assert [path.name for path in resolve(source).weights] == ["model.safetensors"]


def test_data_of_the_wrong_kind(tmp_path: Path, speech: Path) -> None:
    source = write(tmp_path / "source")
    with pytest.raises(DataError, match="this model takes images"):
        latte_convert.convert(source, speech, recipe=RECIPE)


@pytest.mark.parametrize(
    ("name", "resolution", "tokens", "dtype"),
    [
        ("clip", 64, 1 + 8 * 8, torch.float32),
        ("clip", 24, 1 + 3 * 3, torch.float16),
        ("coca", 64, 1 + 8 * 8, torch.float32),
        ("siglip", 96, 1 + 6 * 6, torch.float32),
    ],
)
def test_another_resolution(
    name: str, resolution: int, tokens: int, dtype: torch.dtype, tmp_path: Path, photos: Path
) -> None:
    source = write(tmp_path / "source", name, dtype=dtype)
    result = latte_convert.convert(
        source, photos, recipe=Recipe(kernel="latte", samples=6, ratio=0.5, resolution=resolution)
    )
    assert {result.report.cost.tokens[site] for site in result.report.converted} == {tokens}
    out = result.save(tmp_path / "hybrid")
    before, after = (load_file(path / "open_clip_model.safetensors") for path in (source, out))
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {key for key in after if ".latte." not in key} == before.keys()

    reloaded: Any = latte_convert.load(out)
    x = torch.randn(2, 3, resolution, resolution).to(dtype)
    with torch.no_grad():
        expected = result.model.encode_image(x)  # type: ignore[operator]
        torch.testing.assert_close(reloaded.encode_image(x), expected, rtol=1e-5, atol=1e-5)
    assert latte_convert.verify(out).probe_difference < 1e-5
    assert reloaded.visual.preprocess_cfg["size"] == (resolution, resolution)
    restored = load_file(latte_convert.restore(out, tmp_path / "original") / "open_clip_model.safetensors")
    assert restored.keys() == before.keys()
    assert all(torch.equal(before[key], restored[key]) for key in before)


@pytest.mark.parametrize(("name", "resolution"), [("clip", 64), ("siglip", 96)])
def test_another_resolution_is_as_open_clip_loads_it(name: str, resolution: int, tmp_path: Path, photos: Path) -> None:
    source = write(tmp_path / "source", name)
    library: Any
    library, transform = open_clip.create_model_from_pretrained(f"local-dir:{source}", force_image_size=resolution)
    checkpoint = resolve(source)
    model, unexpected = checkpoint.instantiate(checkpoint.read_tensors(), resolution)
    assert not unexpected
    photo = Image.open(sorted(photos.iterdir())[0]).convert("RGB")
    batch = checkpoint.processor_at("image", resolution).prepare(Sample("a", "", photo), model)
    assert batch["image"].shape == (1, 3, resolution, resolution)
    assert torch.equal(batch["image"], transform(photo)[None])
    with torch.no_grad():
        expected = library.eval().encode_image(batch["image"])
        torch.testing.assert_close(model.encode_image(**batch), expected, rtol=1e-5, atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "resolution", "nearest"), [("clip", 60, "patch size 8; nearest: 64"), ("siglip", 100, "16; nearest: 96")]
)
def test_resolutions_between_patches(name: str, resolution: int, nearest: str, tmp_path: Path, photos: Path) -> None:
    with pytest.raises(CheckpointError, match=f"resolution {resolution} is not a multiple.*{nearest}"):
        latte_convert.convert(
            write(tmp_path / "source", name), photos, recipe=Recipe(kernel="latte", samples=6, resolution=resolution)
        )


def test_resolutions_are_for_images(tmp_path: Path, sentences: Path) -> None:
    with pytest.raises(RecipeError, match="resolution is for images"):
        latte_convert.convert(
            write(tmp_path / "source"), sentences, recipe=Recipe(kernel="latte", samples=6, resolution=64)
        )


def test_a_resnet_has_one_resolution(tmp_path: Path, photos: Path) -> None:
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8},
        "text_cfg": TEXT,
    }
    model = open_clip.CLIP(**config)
    open_clip.model.set_model_preprocess_cfg(model, PREPROCESS)
    save_config_for_hf(model, tmp_path / "open_clip_config.json", config)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "open_clip_model.safetensors")
    with pytest.raises(CheckpointError, match="open_clip runs ModifiedResNet at its own resolution 64 only"):
        latte_convert.convert(tmp_path, photos, recipe=Recipe(kernel="latte", samples=6, resolution=128))


def test_a_changed_configuration_is_found(tmp_path: Path, photos: Path) -> None:
    out = latte_convert.convert(write(tmp_path / "source"), photos, recipe=RECIPE).save(tmp_path / "hybrid")
    config = json.loads((out / "open_clip_config.json").read_text())
    config["model_cfg"]["custom_text"] = True
    (out / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError):
        latte_convert.load(out)


def test_no_logging_handler_is_left_behind(tmp_path: Path) -> None:
    import logging

    root = logging.getLogger()
    before = list(root.handlers), list(root.filters)
    checkpoint = resolve(write(tmp_path / "source"))
    checkpoint.instantiate(checkpoint.read_tensors())
    checkpoint.processor("text")
    assert (root.handlers, root.filters) == before


def test_configurations_used_here_are_open_clips() -> None:
    """The tiny models differ from the library's own configurations in sizes only."""
    library = open_clip.get_model_config("ViT-B-16-SigLIP")
    assert {key: library["vision_cfg"][key] for key in ("timm_pool", "timm_proj")} == {
        key: SIGLIP[key] for key in ("timm_pool", "timm_proj")
    }
    assert set(COCA) <= set(open_clip.get_model_config("coca_ViT-B-32"))
