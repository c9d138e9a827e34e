"""A model of a known library inside anything is found, computes the same, and is converted in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from helpers import assert_same, eligible, exact_handlers
from timm_models import PATCHED, create
from tiny_models import build
from tiny_parts import pixels, text
from torch import Tensor, nn

import latte_convert
from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.attention import TokenLayout
from latte_convert.recipe import Recipe


def under_a_head() -> nn.Module:
    return nn.Sequential(create("vit_tiny_patch16_224", **PATCHED), nn.Linear(5, 3))


class Pooled(nn.Module):
    """A backbone of Transformers, and a decoder of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = build("dinov2")
        self.decoder = nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, 3, 32))

    def forward(self, pixel_values: Tensor) -> Tensor:
        tokens = self.backbone(pixel_values).last_hidden_state
        output: Tensor = self.decoder(self.queries.expand(len(tokens), -1, -1), tokens)
        return output


def wrapped_by_transformers() -> nn.Module:
    arguments = {key: value for key, value in PATCHED.items() if key != "num_classes"}
    config = hf.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args={**arguments, "depth": 1})
    return hf.TimmWrapperModel(config)


def wrapped_by_peft() -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(build("bert"), peft.LoraConfig(r=2, target_modules=["query", "value"]))
    return adapted


_IMAGES = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1))
_BERT = "base_model.model.encoder.layer.*.attention.self"

GUESTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], list[str]]] = {
    "sequential": (under_a_head, {"input": _IMAGES}, ["0.blocks.0.attn", "0.blocks.1.attn"]),
    "custom": (
        Pooled, pixels(),
        [*(f"backbone.encoder.layer.{i}.attention" for i in range(2)), "decoder.self_attn", "decoder.multihead_attn"],
    ),
    "timm in transformers": (wrapped_by_transformers, {"pixel_values": _IMAGES}, ["timm_model.blocks.0.attn"]),
    "peft": (wrapped_by_peft, text(), [_BERT.replace("*", str(i)) for i in range(2)]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("name", GUESTS)
@torch.no_grad()
def test_exact_kernel_gives_the_original(name: str) -> None:
    make, batch, sites = GUESTS[name]
    torch.manual_seed(0)
    model = make().eval()
    assert eligible(model) == sites
    expected = model(**batch)
    with Host.of(model).watch(exact_handlers(sites)):
        assert_same(model(**batch), expected, batch.get("attention_mask"))


@pytest.mark.parametrize("name", [name for name in GUESTS if name != "peft"])  # peft: merged before it is converted
def test_converted_in_place_saved_and_read_back(name: str, tmp_path: Path) -> None:
    make, batch, sites = GUESTS[name]
    torch.manual_seed(0)
    model = make().eval()
    batches = [{key: value + 0.1 * i for key, value in batch.items()} for i in range(3)]
    recipe = Recipe(kernel="latte", ratio=1.0, samples=3)
    result = latte_convert.convert(model, batches, recipe=recipe, progress=False)
    assert result.model is model
    assert result.report.converted == sites
    out = result.save(tmp_path / "hybrid")
    again = latte_convert.load(out, model=None if name == "timm in transformers" else make())
    with torch.no_grad():
        assert_same(again(**batch), model(**batch))


def test_a_guest_keeps_its_grid() -> None:
    model = under_a_head().eval()
    found: list[TokenLayout] = []
    with Host.of(model).watch({"0.blocks.1.attn": lambda call: found.append(call.layout)}), torch.no_grad():
        model(_IMAGES)
    assert found == [TokenLayout(1, (4, 4))]


def test_the_output_projection_of_a_guest_and_of_the_module_around_it() -> None:
    model = Pooled()
    adapter = find_adapter(model)
    name = "backbone.encoder.layer.0.attention"
    assert adapter.output_projection(model, name) is model.get_submodule(f"{name}.o_proj")
    assert adapter.output_projection(model, "decoder.self_attn") is model.decoder.self_attn.out_proj
