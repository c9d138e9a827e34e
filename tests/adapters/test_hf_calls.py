"""What a routed call says: obstacles, causality, attention weights, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from helpers import ADAPTER, Exact, assert_same, eligible, latte_kernels
from tiny_models import BY_NAME, build
from tiny_parts import text
from torch import Tensor, nn

from latte_convert.adapters.convert import apply
from latte_convert.adapters.hf import latte_attention_forward
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall
from latte_convert.errors import CheckpointError

SITE = "encoder.layer.0.attention.self"


def _calls(model: nn.Module, site: str, inputs: dict[str, Any]) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with Host(model, ADAPTER).watch({site: calls.append}), torch.no_grad():
        model(**inputs)
    return calls


@pytest.mark.parametrize(
    ("argument", "obstacle"),
    [
        ({}, None),
        ({"softcap": None}, None),
        ({"softcap": 30.0}, "its attention call passes 'softcap', which no linear kernel honours"),
        ({"sliding_window": 4}, "its attention call passes 'sliding_window', which no linear kernel honours"),
        ({"deterministic": True, "output_attentions": True, "position_ids": torch.arange(5)}, None),
    ],
)
def test_an_unknown_argument_is_an_obstacle(argument: dict[str, Any], obstacle: str | None) -> None:
    model = build("bert", "eager")
    calls: list[AttentionCall] = []
    tokens = torch.randn(1, 4, 5, 8)
    with Host(model, ADAPTER).watch({SITE: calls.append}):
        latte_attention_forward(model.get_submodule(SITE), tokens, tokens, tokens, None, **argument)
    assert [call.obstacle for call in calls] == [obstacle]


def test_a_converted_site_with_an_obstacle_names_itself() -> None:
    model = build("bert")
    apply(model, ADAPTER, latte_kernels(model))
    window = torch.ones(12, 12, dtype=torch.bool).tril(2).triu(-2)[None, None].expand(2, 1, 12, 12)
    with pytest.raises(CheckpointError, match=rf"{SITE}: the attention mask is not key padding .*exclude this site"):
        model(input_ids=text()["input_ids"], attention_mask=window)


def test_local_attention_is_an_obstacle_when_routed_all_the_same() -> None:
    """ModernBERT's layer 1 sees two tokens to either side; it is not eligible, and routing it says why."""
    (call,) = _calls(build("modernbert"), "layers.1.attn", text())
    assert "sliding_window" in (call.obstacle or "")


@pytest.mark.parametrize(
    ("name", "site", "cause"),
    [
        ("t5", "encoder.block.1.layer.0.SelfAttention", "position_bias"),
        ("beit", "layers.0.attention", "carries a bias"),
        ("swin", "encoder.layers.0.blocks.0.attention", "carries a bias"),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_bias_is_an_obstacle_in_the_call_too(name: str, site: str, cause: str, attention: str) -> None:
    model, inputs = build(name, attention), BY_NAME[name].inputs()
    if name != "t5":  # initialised to zero, which is no bias
        for module in model.modules():
            if hasattr(module, "relative_position_bias_table"):
                nn.init.normal_(module.relative_position_bias_table)
    with torch.no_grad():
        expected = model(**inputs)
        calls: list[AttentionCall] = []
        with Host(model, ADAPTER).watch({site: calls.append}):
            assert_same(model(**inputs), expected, tolerance=0)  # left to the original
    assert cause in (calls[0].obstacle or "")


def test_packed_sequences_are_an_obstacle() -> None:
    model = build("llama")
    inputs = {
        "input_ids": text((6,))["input_ids"],
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "use_cache": False,
    }
    (call,) = _calls(model, "layers.0.self_attn", inputs)
    assert "packed sequences" in (call.obstacle or "")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_causality_is_that_of_the_mask(attention: str) -> None:
    """The text tower of CLIP gets a causal mask, or none and a flag; its module says it is not causal."""
    model, inputs = build("clip", attention), BY_NAME["clip"].inputs()
    site = "text_model.encoder.layers.0.self_attn"
    assert model.get_submodule(site).is_causal is False
    (padded,) = _calls(model, site, inputs)
    (full,) = _calls(model, site, {**inputs, "attention_mask": torch.ones(2, 12, dtype=torch.long)})
    assert padded.causal
    assert full.causal
    assert padded.mask is not None
    assert padded.mask.tolist() == inputs["attention_mask"].bool().tolist()
    (vision,) = _calls(model, "vision_model.encoder.layers.0.self_attn", inputs)
    assert not vision.causal
    assert vision.mask is None


@pytest.mark.parametrize(
    ("attention", "shape", "causal"),
    [
        ("sdpa", None, True),  # no mask: the module's flag decides
        ("eager", None, False),  # eager functions do not know the flag
        ("sdpa", (2, 1, 1, 6), False),  # a mask that is the same for all queries is all there is
        ("eager", (2, 1, 1, 6), False),
        ("sdpa", (1, 1, 6, 6), True),  # one mask for the whole batch
        ("eager", (1, 1, 6, 6), True),
    ],
)
def test_a_call_means_what_the_original_function_computes(
    attention: str, shape: tuple[int, ...] | None, causal: bool
) -> None:
    """A causal site, called in every way: softmax from the call's own terms equals the library's function."""
    model = build("llama", attention)
    module = model.get_submodule("layers.0.self_attn")
    query, key, value = torch.randn(3, 2, 4, 6, 8)
    mask = None
    if shape is not None:
        mask = torch.ones(shape).tril() if shape[2] == 6 else torch.ones(shape)
        mask[..., 5] = 0
        mask = torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min)

    def attend(call: AttentionCall) -> Tensor:
        assert call.causal == causal
        torch.testing.assert_close(Exact()(call), call.exact(), rtol=1e-5, atol=1e-6)
        return call.exact()

    with Host(model, ADAPTER).watch({"layers.0.self_attn": attend}):
        output, _ = latte_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert output.shape == (2, 6, 4, 8)


def test_scale_is_the_modules_own() -> None:
    model = build("vit")
    module = model.get_submodule("layers.0.attention")
    module.scaling = 0.25
    (call,) = _calls(model, "layers.0.attention", BY_NAME["vit"].inputs())
    assert call.scale == 0.25
    assert call.module is module


def test_dropout_in_training_mode() -> None:
    config = hf.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=60,
        attention_probs_dropout_prob=0.25,
    )
    model = hf.BertModel(config).train()
    (call,) = _calls(model, SITE, text())
    assert call.dropout == 0.25
    apply(model, ADAPTER, latte_kernels(model))
    with pytest.raises(CheckpointError, match=r"attention dropout of 0\.25 has no meaning"):
        model(**text())
    model.eval()
    assert model(**text()).last_hidden_state.isfinite().all()


def test_a_handler_sees_the_mask_of_every_layer() -> None:
    model, handler = build("bert"), Exact()
    with Host(model, ADAPTER).watch(dict.fromkeys(eligible(model), handler)), torch.no_grad():
        model(**text())
    assert handler.calls == 2
