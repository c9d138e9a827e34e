"""open_clip's towers: which sites there are, and that routing changes nothing but who computes attention."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as hf
from helpers import eligible, exact_handlers, latte_kernels
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from open_clip_models import MODELS, TEXT, VISION, build
from torch import Tensor, nn

from latte_convert.adapters.convert import apply
from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.adapters.open_clip import OpenClipAdapter


def inputs(model: Any) -> dict[str, Tensor]:
    size = model.visual.image_size[0]
    texts = ["a cat", "two dogs on a mat and a bird over the house"]
    return {"image": torch.randn(2, 3, size, size), "text": open_clip.tokenize(texts, 16)}


@torch.no_grad()
def run(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(model, CoCa):
        output = model(**batch)
        return {key: output[key] for key in ("image_features", "text_features", "logits")}
    return {"image": model.encode_image(batch["image"]), "text": model.encode_text(batch["text"])}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_exact_kernel_gives_the_original_and_each_site_is_called_once(name: str) -> None:
    model = build(name)
    batch = inputs(model)
    expected = run(model, batch)
    handlers = exact_handlers(eligible(model))
    with Host(model, find_adapter(model)).watch(handlers):
        assert_close(run(model, batch), expected)
    assert {handler.calls for handler in handlers.values()} == {1}  # type: ignore[attr-defined]
    assert_close(run(model, batch), expected, tolerance=0)


def test_sites_of_a_clip() -> None:
    model = build("clip")
    sites = Host.of(model).sites()
    assert isinstance(find_adapter(model), OpenClipAdapter)
    assert {(site.name.rpartition("resblocks")[0], site.tower, site.causal) for site in sites} == {
        ("transformer.", "text", True),
        ("visual.transformer.", "vision", False),
    }
    assert len(sites) == 4
    assert {(site.kind, site.heads, site.head_dim, site.reason) for site in sites} == {("self", 4, 8, None)}


def test_sites_of_a_coca() -> None:
    sites = {site.name: site for site in Host.of(build("coca")).sites()}
    assert sites["visual.attn_pool.attn"].reason == "attention pooling by learned queries"
    assert [s.name for s in sites.values() if not s.eligible] == ["visual.attn_pool.attn"]
    decoder = {name: (s.kind, s.causal) for name, s in sites.items() if s.tower == "decoder"}
    assert decoder == {
        **{f"text_decoder.resblocks.{i}.attn": ("self", True) for i in range(2)},
        **{f"text_decoder.cross_attn.{i}.attn": ("cross", False) for i in range(2)},
    }


def test_sites_of_a_siglip() -> None:
    sites = {site.name: site for site in Host.of(build("siglip")).sites()}
    assert sites["visual.trunk.blocks.0.attn"].tower == "vision"
    assert sites["visual.trunk.attn_pool"].reason is not None
    assert {site.causal for site in sites.values()} == {False}
    assert [name for name, site in sites.items() if not site.eligible] == ["visual.trunk.attn_pool"]


@pytest.mark.parametrize(
    ("vision", "reasons"),
    [
        ({**VISION, "scaled_cosine_attn": True}, 2),
        ({**VISION, "layers": [1, 1, 1, 1], "width": 8, "image_size": 64}, 1),
        ({"image_size": 160, "timm_model_name": "test_convnext", "timm_pool": "rot_attn", "timm_proj": ""}, 1),
    ],
    ids=["scaled cosine", "resnet", "rotary pooling"],
)
def test_vision_towers_that_stay_exact(vision: dict[str, Any], reasons: int) -> None:
    model = CLIP(embed_dim=16, vision_cfg=vision, text_cfg=TEXT)
    found = [site.reason for site in Host.of(model).sites() if site.tower == "vision"]
    assert len(found) == reasons
    assert all(found)


def test_layout_of_the_vision_tower() -> None:
    model = build("clip")
    layouts: dict[str, Any] = {}
    watch = {
        name: lambda call, name=name: layouts.update({name: call.layout})
        for name in ("visual.transformer.resblocks.0.attn", "transformer.resblocks.0.attn")
    }
    with Host(model, find_adapter(model)).watch(watch):
        run(model, inputs(model))
    vision, text = (layouts[name] for name in watch)
    assert (vision.prefix, vision.grid) == (1, (4, 4))
    assert (text.prefix, text.grid) == (0, None)


@pytest.mark.parametrize("name", ["clip", "custom", "coca"])
def test_later_tokens_do_not_move_earlier_ones(name: str) -> None:
    model = build(name)
    apply(model, find_adapter(model), latte_kernels(model))
    tower: Any = getattr(model, "text", model)
    states: list[Tensor] = []
    tower.transformer.register_forward_hook(lambda _module, _args, output: states.append(output))
    tokens = inputs(model)["text"]
    changed = tokens.clone()
    changed[:, 6:] = torch.randint(1, 40000, changed[:, 6:].shape)
    model.encode_text(tokens)
    model.encode_text(changed)
    torch.testing.assert_close(states[0][:, :6], states[1][:, :6], rtol=1e-5, atol=1e-5)
    assert (states[0][:, 6:] - states[1][:, 6:]).abs().max() > 1e-2


def test_padding_of_a_coca_text_takes_no_part() -> None:
    """CoCa's class token sees the text through a mask that says where padding is."""
    model = build("coca correct mask")
    apply(model, find_adapter(model), latte_kernels(model))
    tokens = inputs(model)["text"][:1]
    before = model.encode_text(tokens)
    with torch.no_grad():
        model.text.token_embedding.weight[model.text.pad_id] += 5.0
    torch.testing.assert_close(model.encode_text(tokens), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["clip", "custom", "coca", "siglip"])
def test_undo_and_copies(name: str) -> None:
    model = build(name)
    batch = inputs(model)
    attributes = [list(vars(module)) for module in model.modules()]
    original = run(model, batch)
    applied = apply(model, find_adapter(model), latte_kernels(model))
    converted = run(model, batch)
    assert any(not torch.equal(converted[key], original[key]) for key in original)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), torch.load(buffer, weights_only=False)]
    assert applied.unused() == []
    applied.undo()
    assert [list(vars(module)) for module in model.modules()] == attributes
    assert_close(run(model, batch), original, tolerance=0)
    for twin in twins:
        assert_close(run(twin, batch), converted, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "custom"])
def test_a_compiled_graph(name: str) -> None:
    model = build(name)
    batch = inputs(model)
    apply(model, find_adapter(model), latte_kernels(model))
    expected = run(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        image, text, _ = compiled(**batch)
    torch.testing.assert_close(image, nn.functional.normalize(expected["image"], dim=-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(text, nn.functional.normalize(expected["text"], dim=-1), rtol=1e-5, atol=1e-5)


def test_output_projections() -> None:
    model, custom = build("clip"), build("custom")
    name = "transformer.resblocks.0.attn"
    assert find_adapter(model).output_projection(model, name) is model.get_submodule(name).out_proj
    assert find_adapter(custom).output_projection(custom, name) is None  # head scales and a norm stand between
    siglip = build("siglip")
    block = "visual.trunk.blocks.0.attn"
    assert find_adapter(siglip).output_projection(siglip, block) is siglip.get_submodule(block).proj


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite(dtype: torch.dtype) -> None:
    model = build("clip").to(dtype)
    batch = inputs(model)
    batch["image"] = batch["image"].to(dtype)
    apply(model, find_adapter(model), latte_kernels(model))
    assert all(value.isfinite().all() and value.dtype == dtype for value in run(model, batch).values())


def test_a_text_tower_of_transformers(tmp_path: Path) -> None:
    config = hf.RobertaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    text = {"hf_model_name": str(tmp_path), "hf_model_pretrained": False, "hf_proj_type": "mlp"}
    model = CustomTextCLIP(embed_dim=16, vision_cfg=VISION, text_cfg=text).eval()
    sites = [site for site in Host.of(model).sites() if site.tower == "text"]
    assert [site.name for site in sites] == [f"text.transformer.encoder.layer.{i}.attention.self" for i in range(2)]
    assert {(site.eligible, site.causal) for site in sites} == {(True, False)}
    batch = {"image": torch.randn(2, 3, 32, 32), "text": torch.tensor([[0, 5, 6, 7, 2], [0, 9, 2, 1, 1]])}
    expected = run(model, batch)
    handlers = exact_handlers(eligible(model))
    with Host(model, find_adapter(model)).watch(handlers):
        assert_close(run(model, batch), expected)
    assert {handler.calls for handler in handlers.values()} == {1}  # type: ignore[attr-defined]
    apply(model, find_adapter(model), latte_kernels(model))
    padded = model.encode_text(batch["text"])
    torch.testing.assert_close(padded[1:], model.encode_text(batch["text"][1:, :3]), rtol=1e-5, atol=1e-5)
