"""What is saved is what is in memory, wherever the hybrid came from; what could not be loaded again is refused."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import latte_convert
from latte_convert.artifact.manifest import read_manifest
from latte_convert.errors import CheckpointError, OutputError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

LATTE = Recipe(kernel="latte", samples=4)
PIXELS = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def source(tiny_dino: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_dino, tmp_path / "source")


@pytest.fixture
def result(source: Path, photos: Path):
    return latte_convert.convert(source, photos, recipe=LATTE)


def train(model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(PIXELS).last_hidden_state - 1).square().mean().backward()
        optimizer.step()


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PIXELS.to(next(model.parameters()).dtype)).last_hidden_state


def equal(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )


def test_an_untouched_hybrid_keeps_the_tensors_of_its_source(result, source: Path, tmp_path: Path) -> None:
    out = latte_convert.save(result.model, tmp_path / "hybrid")
    assert read_manifest(out).weights == "source"
    original, saved = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(original[key], saved[key]) for key in original)
    again = latte_convert.save(latte_convert.load(out), tmp_path / "again")
    for name in ("model.safetensors", "config.json", "latte.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


def test_a_trained_hybrid_is_saved_as_trained(result, tmp_path: Path) -> None:
    before = answer(result.model)
    train(result.model)
    assert (answer(result.model) - before).abs().max() > 0.1
    out = result.save(tmp_path / "hybrid")
    manifest = read_manifest(out)
    assert manifest.weights == "in memory"
    assert manifest.source.sha256, "the source's weights stay on record"
    loaded = latte_convert.load(out)
    assert equal(loaded, result.model)
    assert torch.equal(answer(loaded), answer(result.model))
    assert latte_convert.verify(out).probe_difference < 1e-6
    assert transformers.AutoImageProcessor.from_pretrained(out).crop_size["height"] == 56
    without = latte_convert.restore(out, tmp_path / "without kernels")
    trained = {key: value for key, value in result.model.state_dict().items() if ".latte." not in key}
    restored = transformers.Dinov2Model.from_pretrained(without).state_dict()
    assert restored.keys() == trained.keys()
    assert all(torch.equal(restored[key], trained[key]) for key in trained)


def test_nothing_is_written_outside_of_what_a_next_run_would_clean(result, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    for name in ("untouched", "trained"):
        path = latte_convert.save(result.model, tmp_path / name)
        assert not [file for file in path.iterdir() if file.name.startswith(".")]
        assert latte_convert.load(path, verify=True)
        train(result.model)


def test_only_a_kernel_was_trained(result, tmp_path: Path) -> None:
    """The source's tensors are still those in memory, so they are written under its own keys."""
    with torch.no_grad():
        next(value for key, value in result.model.named_parameters() if key.endswith("latte.sigma")).mul_(1.5)
    out = latte_convert.save(result.model, tmp_path / "hybrid")
    assert read_manifest(out).weights == "source"
    assert equal(latte_convert.load(out), result.model)
    assert latte_convert.verify(out).probe_difference < 1e-6


def test_a_loaded_hybrid_is_trained_and_saved_over_itself(result, source: Path, tmp_path: Path) -> None:
    out = result.save(tmp_path / "hybrid")
    shutil.rmtree(source)
    loaded = latte_convert.load(out)
    with pytest.raises(OutputError, match="exists already"):
        latte_convert.save(loaded, out)
    train(loaded)
    latte_convert.save(loaded, out, overwrite=True)
    assert equal(latte_convert.load(out), loaded)
    assert latte_convert.verify(out).files == 4
    assert [path.name for path in tmp_path.iterdir()] == ["hybrid"]


def test_a_source_is_never_saved_over(result, source: Path) -> None:
    with pytest.raises(OutputError, match="would be lost"):
        latte_convert.save(result.model, source, overwrite=True)
    assert transformers.Dinov2Model.from_pretrained(source).config.hidden_size == 48


def halved(model: Any) -> Any:
    return model.half()


def mixed(model: Any) -> Any:
    model.bfloat16()
    model.layernorm.float()
    return model


def far_away(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("change", [halved, mixed, copy.deepcopy, far_away, nn.DataParallel, torch.compile])
def test_whatever_became_of_it(result, source: Path, tmp_path: Path, change: Any) -> None:
    model = change(result.model)
    assert latte_convert.is_hybrid(model)
    if change is far_away:
        shutil.rmtree(source)
    inner = getattr(model, "module", getattr(model, "_orig_mod", model))
    loaded = latte_convert.load(latte_convert.save(model, tmp_path / "hybrid"))
    assert equal(loaded, inner)
    assert latte_convert.verify(tmp_path / "hybrid").probe_difference < 1e-3


def test_modules_keep_their_mode(result, tmp_path: Path) -> None:
    result.model.train()
    result.model.embeddings.eval()
    before = [module.training for module in result.model.modules()]
    latte_convert.save(result.model, tmp_path / "hybrid")
    assert [module.training for module in result.model.modules()] == before
    assert len(set(before)) == 2


def test_what_is_no_hybrid_is_told_apart(result, tiny_dino: Path, tmp_path: Path) -> None:
    original = transformers.Dinov2Model.from_pretrained(tiny_dino)
    assert not latte_convert.is_hybrid(original)
    with pytest.raises(CheckpointError, match="is not a hybrid"):
        latte_convert.save(original, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds a hybrid, Dinov2Model at '0'.*save model\.0"):
        latte_convert.save(nn.Sequential(result.model, nn.Linear(48, 5)), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds converted attention but not the record"):
        latte_convert.save(result.model.encoder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is converted already"):
        latte_convert.convert(result.model, [{"pixel_values": PIXELS}] * 4, recipe=LATTE)
    assert not (tmp_path / "out").exists()


def test_after_undo_nothing_is_left(result, tmp_path: Path) -> None:
    from latte_convert.artifact.load import open_artifact

    artifact = open_artifact(result.save(tmp_path / "hybrid"))
    before = dict(artifact.model.__dict__)
    with artifact.convert():
        assert latte_convert.is_hybrid(artifact.model)
    assert not latte_convert.is_hybrid(artifact.model)
    assert artifact.model.__dict__ == before


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=50
        )
    ).eval()


def sentences(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(5, 50, (1, 12), generator=generator)} for _ in range(count)]


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["query"]), model)


def with_weight_norm(model: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model.encoder.layer[0].intermediate.dense)
    return model


def with_a_head(model: Any) -> Any:
    model.pooler.dense = nn.Linear(32, 7)
    return model


def with_relu(model: Any) -> Any:
    model.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()
    return model


def with_a_hook(model: Any) -> Any:
    model.encoder.layer[0].intermediate.register_forward_hook(lambda module, args, output: 0.5 * output)
    return model


def with_a_setting(model: Any) -> Any:
    model.encoder.layer[0].output.LayerNorm.eps = 0.5
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_relu, "does something else than what its class builds.*last_hidden_state' differs"),
        (with_a_hook, "a hook or a forward was changed in memory"),
        (with_a_setting, "Write it into the configuration"),
        (with_lora, r"query\.base_layer\.bias.*3 missing|merge_and_unload"),
        (with_weight_norm, r"2 more \(.*weight\.original0.*1 missing \(.*dense\.weight\).*remove_parametrizations"),
        (with_a_head, r"2 of another shape \(pooler\.dense\.bias, pooler\.dense\.weight\)"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_before_any_work(change: Any, message: str, monkeypatch) -> None:
    monkeypatch.setattr("latte_convert.conversion.calibrate", lambda *_, **__: pytest.fail("calibrated"))
    with pytest.raises(CheckpointError, match=message):
        latte_convert.convert(change(bert()), sentences(), recipe=LATTE)


def test_what_cannot_be_rebuilt_any_more_is_refused(tmp_path: Path) -> None:
    result = latte_convert.convert(bert(), sentences(), recipe=LATTE)
    with_weight_norm(result.model)
    with pytest.raises(CheckpointError, match="remove_parametrizations"):
        result.save(tmp_path / "hybrid")
    dense = result.model.encoder.layer[0].intermediate.dense
    nn.utils.parametrize.remove_parametrizations(dense, "weight")
    assert equal(latte_convert.load(result.save(tmp_path / "hybrid")), result.model)


def test_tensors_that_the_class_does_not_tie_are_saved(tmp_path: Path) -> None:
    model = bert()
    model.encoder.layer[1].intermediate = model.encoder.layer[0].intermediate
    result = latte_convert.convert(model, sentences(), recipe=LATTE)
    assert equal(latte_convert.load(result.save(tmp_path / "hybrid")), result.model)


def test_a_change_that_no_tensor_shows_is_found(tmp_path: Path) -> None:
    result = latte_convert.convert(bert(), sentences(), recipe=LATTE)
    result.model.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()
    with pytest.raises(CheckpointError, match="its answer to a probe"):
        result.save(tmp_path / "hybrid")
    assert not list(tmp_path.iterdir())


def test_a_configuration_that_was_changed_in_memory_is_written(result, tmp_path: Path) -> None:
    train(result.model)
    result.model.config.label2id = {"cat": 0, "dog": 1}
    out = latte_convert.save(result.model, tmp_path / "hybrid")
    assert json.loads((out / "config.json").read_text())["label2id"] == {"cat": 0, "dog": 1}


def test_a_timm_model_trained_at_another_resolution(photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=64, num_classes=5)
    timm.models.save_for_hf(model, str(tmp_path / "source"), safe_serialization=True)
    result = latte_convert.convert(tmp_path / "source", photos, recipe=Recipe(kernel="latte", samples=4, resolution=96))
    with torch.no_grad():
        result.model.pos_embed.add_(0.25)
    loaded = latte_convert.load(result.save(tmp_path / "hybrid"))
    assert loaded.pos_embed.shape == (1, 37, 48)
    assert equal(loaded, result.model)
    assert latte_convert.verify(tmp_path / "hybrid").probe_difference < 1e-6


def llava() -> Any:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    text = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=60
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=40, vision_feature_layer=-1)
    ).eval()


def test_a_model_that_counts_its_image_tokens_is_saved(tmp_path: Path) -> None:
    """Random text ids would hold another number of image tokens than the picture has patches."""
    generator = torch.Generator().manual_seed(2)

    def batch() -> dict[str, Any]:
        words = torch.randint(10, 59, (1, 6), generator=generator)
        words[words == 40] = 41
        ids = torch.cat([words[:, :2], torch.full((1, 16), 40), words[:, 2:]], dim=1)
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}

    recipe = Recipe(kernel="latte", towers=["vision"], k=1)
    result = latte_convert.convert(llava(), [batch() for _ in range(4)], recipe=recipe, progress=False)
    out = result.save(tmp_path / "hybrid")
    probe = read_manifest(out).probe
    assert probe is not None
    assert probe.inputs["input_ids"]["kept"] == {str(place): 40 for place in range(2, 18)}
    assert latte_convert.verify(out).probe_difference < 1e-6
