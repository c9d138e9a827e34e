"""What people combine a model with, on hybrids: one row each, with what it must give."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import latte_convert
from latte_convert.adapters.host import Host
from latte_convert.kernels.registry import get_kernel, kernel_names

pytestmark = pytest.mark.slow

PIXELS = torch.randn(3, 3, 168, 168, generator=torch.Generator().manual_seed(3))
SETTINGS: dict[str, dict[str, Any]] = {
    "near_far": {"kernel": "near_far", "k": 2, "options": {"window": 2, "halo": 1, "clusters": 12}},
    "merged": {"ratio": 0.0, "merge": 0.5},
}


@pytest.fixture(scope="module", params=SETTINGS)
def saved(request: Any, tiny_dino: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DINOv2 with near_far in two layers, and one that merges its tokens."""
    recipe = latte_convert.Recipe(samples=4, resolution=168, **SETTINGS[request.param])
    result = latte_convert.convert(tiny_dino, photos, recipe=recipe, progress=False)
    return result.save(tmp_path_factory.mktemp("composed") / "hybrid")


def answer(model: Any, pixels: Tensor = PIXELS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(pixels).last_hidden_state
    return found.float()


def cosine(found: Tensor, expected: Tensor) -> float:
    """Median over tokens: where two are about as alike to a third, rounding says which of them it joins."""
    return float(nn.functional.cosine_similarity(found, expected, dim=-1).median())


def dynamic_8_bit(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch points to torchao
        made: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert not any(type(module) is nn.Linear for module in made.modules())
    return made


def weights_8_bit(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    before = model.encoder.layer[0].mlp.fc1.weight
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model.encoder.layer[0].mlp.fc1.weight) is not type(before)
    return model


def autocast(model: nn.Module) -> Callable[..., Any]:
    return torch.autocast("cpu", torch.bfloat16)(model)


def low(dtype: torch.dtype) -> Callable[[nn.Module], Callable[..., Any]]:
    def change(model: nn.Module) -> Callable[..., Any]:
        model.to(dtype)
        return lambda pixels: model(pixels.to(dtype))

    return change


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


ROUGH: dict[str, Callable[[Any], Any]] = {
    "8-bit, dynamic": dynamic_8_bit,
    "8-bit weights of torchao": weights_8_bit,
    "bfloat16": low(torch.bfloat16),
    "float16": low(torch.float16),
    "autocast": autocast,
}
"""By name: what rounds the numbers of a model."""
ROWS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "compiled": (compiled, 1 - 1e-6),
    "deepcopy": (copy.deepcopy, 1.0),
    "pickle": (pickled, 1.0),
}
"""By name: what is made of a hybrid, and the least cosine of its output with the hybrid's; at 1 both are equal."""


@pytest.fixture(scope="module")
def real(models_dir: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real DINOv2 and hybrids of it."""
    places = {"original": models_dir / "dinov2-small-saliency"}
    for name, settings in SETTINGS.items():
        recipe = latte_convert.Recipe(samples=4, resolution=168, **settings)
        result = latte_convert.convert(places["original"], photos, recipe=recipe, progress=False)
        places[name] = result.save(tmp_path_factory.mktemp("real") / name)
    return places


@pytest.fixture(scope="module")
def pixels(photos: Path, models_dir: Path) -> Tensor:
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(models_dir / "dinov2-small-saliency")
    images = [Image.open(path) for path in sorted(photos.iterdir())]
    size = {"height": 168, "width": 168}
    pixels: Tensor = processor(images, return_tensors="pt", size=size, do_center_crop=False).pixel_values
    return pixels


@pytest.mark.parametrize("row", ROUGH)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_real_hybrid_is_as_close_to_the_original(name: str, row: str, real: dict[str, Path], pixels: Tensor) -> None:
    """Rounding costs what it costs the original. Which tokens merge it may change, to others that are as alike."""
    original = transformers.AutoModel.from_pretrained(real["original"])
    expected, hybrid = answer(original, pixels), answer(latte_convert.load(real[name]), pixels)

    def loss(found: Tensor) -> float:
        return 1 - float(nn.functional.cosine_similarity(found, expected, dim=-1).mean())

    rounding = loss(answer(ROUGH[row](original), pixels))
    found = answer(ROUGH[row](latte_convert.load(real[name])), pixels)
    assert not torch.equal(found, hybrid)
    assert loss(found) < 1.2 * loss(hybrid) + 2 * rounding


@pytest.mark.parametrize("row", ROWS)
def test_it_computes_what_the_hybrid_does(row: str, saved: Path) -> None:
    change, least = ROWS[row]
    model = latte_convert.load(saved)
    expected = answer(model)
    found = answer(change(model))
    assert torch.equal(found, expected) if least == 1 else cosine(found, expected) > least


def replicas(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As ``DataParallel`` makes them for three GPUs; what it would send there is copied here."""
    home: Any = sys.modules["torch.nn.parallel.replicate"]  # of this name the package has a function
    monkeypatch.setattr(home, "_get_device_index", lambda device, optional: device)
    monkeypatch.setattr(
        home, "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[tensor.clone() for tensor in tensors] for _ in devices],
    )  # fmt: skip
    made: list[Any] = home.replicate(model, [0, 1, 2])
    assert not any(dict(each.named_parameters()) for each in made)
    return made


@pytest.mark.parametrize("make", [lambda model, _: [model] * 3, replicas], ids=["one model", "replicas"])
def test_threads(make: Callable[..., list[Any]], saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time, on images of different sizes."""
    model = latte_convert.load(saved)
    images = [PIXELS[..., :size, :size] for size in (168, 112, 140)]
    expected = [answer(model, each) for each in images]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            found = list(threads.map(answer, make(model, monkeypatch), images))
            assert all(map(torch.equal, found, expected))


def test_gradient_checkpointing(saved: Path) -> None:
    def gradients(checkpointing: bool) -> list[Tensor]:
        model = latte_convert.load(saved).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(PIXELS).last_hidden_state.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for again, once in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(again, once, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own use of it
def test_lora_is_trained_merged_saved_and_read(saved: Path, tmp_path: Path) -> None:
    import peft

    model = latte_convert.load(saved)
    before = answer(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    optimiser = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        adapted(pixel_values=PIXELS).last_hidden_state.square().mean().backward()
        optimiser.step()
    trained = answer(adapted.eval())
    assert not torch.allclose(trained, before, atol=1e-2)
    merged = adapted.merge_and_unload()
    expected = answer(merged)
    torch.testing.assert_close(cosine(expected, trained), 1.0, rtol=0, atol=1e-5)
    latte_convert.save(merged, tmp_path / "new")
    assert torch.equal(answer(latte_convert.load(tmp_path / "new")), expected)


def test_trainer_saves_the_hybrid(saved: Path, tmp_path: Path) -> None:
    model = latte_convert.load(saved)
    arguments = transformers.TrainingArguments(tmp_path / "run", use_cpu=True, report_to=[])
    transformers.Trainer(model, arguments).save_model(tmp_path / "new")
    assert torch.equal(answer(latte_convert.load(tmp_path / "new")), answer(model))


def test_a_state_dict_in_a_file_does_not_fit_the_original(saved: Path, tiny_dino: Path, tmp_path: Path) -> None:
    model = latte_convert.load(saved)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match="latte"):
        transformers.AutoModel.from_pretrained(tiny_dino).load_state_dict(state)
    other = latte_convert.load(saved)
    nn.init.zeros_(other.layernorm.weight)
    other.load_state_dict(state)
    assert torch.equal(answer(other), answer(model))


def test_batches_of_several_workers(tiny_dino: Path, saved: Path) -> None:
    """What a conversion is calibrated on, and what a hybrid computes: in the workers, too, that each have a copy."""
    pixels = torch.randn(8, 3, 56, 56, generator=torch.Generator().manual_seed(0))

    def converted(workers: int) -> Tensor:
        loader = DataLoader([{"pixel_values": each} for each in pixels], batch_size=2, num_workers=workers)
        model = transformers.AutoModel.from_pretrained(tiny_dino)
        recipe = latte_convert.Recipe(kernel="latte", k=2, samples=6)
        return answer(latte_convert.convert(model, loader, recipe=recipe, progress=False).model)

    assert torch.equal(converted(2), converted(0))
    model = latte_convert.load(saved)
    features = DataLoader(
        pixels, batch_size=4, num_workers=2, collate_fn=lambda images: answer(model, torch.stack(images))
    )
    assert torch.equal(torch.cat(list(features)), torch.cat([answer(model, pixels[:4]), answer(model, pixels[4:])]))


@pytest.mark.parametrize("kernel", kernel_names())
def test_every_kernel_compiles_to_one_graph(kernel: str, tiny_dino: Path) -> None:
    model = transformers.AutoModel.from_pretrained(tiny_dino)
    host = Host.of(model)
    site = host.sites()[0]
    host.convert({site.name: get_kernel(kernel)(site.heads, site.head_dim)})
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(answer(whole), answer(model), rtol=1e-4, atol=1e-4)
