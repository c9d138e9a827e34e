"""What a routed call says: obstacles, causality, attention weights, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from helpers import ADAPTER, Exact, eligible, exact_handlers, latte_kernels
from tiny_models import BY_NAME, build
from tiny_parts import text, wav2vec2_inputs
from torch import Tensor, nn

from latte_convert.adapters.convert import apply
from latte_convert.adapters.hf import latte_attention_forward
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall
from latte_convert.errors import CheckpointError
from latte_convert.kernels.near_far.kernel import NearFarKernel

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
    ("name", "site", "samples", "padded"),
    [
        ("t5", "encoder.block.1.layer.0.SelfAttention", 1, True),
        ("beit", "layers.0.attention", 1, False),
        ("sam", "vision_encoder.layers.1.attn", 2, False),
        ("wavlm", "encoder.layers.1.attention", 2, False),
        ("swin", "encoder.layers.0.blocks.0.attention", 1, False),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_bias_comes_with_the_call(name: str, site: str, samples: int, padded: bool, attention: str) -> None:
    (call,) = _calls(build(name, attention), site, BY_NAME[name].inputs())
    assert call.obstacle is None
    assert call.bias is not None
    assert call.bias.shape == (samples, *call.query.shape[1:3], call.key.shape[2])
    assert (call.mask is not None) is padded
    torch.testing.assert_close(Exact()(call), call.exact(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")  # the model's own masks
def test_wavlm_has_padding_beside_its_bias() -> None:
    model, inputs = build("wavlm"), wav2vec2_inputs()
    calls = _calls(model, "encoder.layers.0.attention", inputs)
    assert [call.mask is not None and call.mask.sum(1).tolist() for call in calls] == [[19, 12]]
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with Host(model, ADAPTER).watch(exact_handlers(eligible(model))):
            actual = model(**inputs).last_hidden_state
            weights = model(**inputs, output_attentions=True).attentions
        original = model(**inputs, output_attentions=True).attentions
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(weights, original, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_bias_that_hides_padding_too_is_divided() -> None:
    model = build("beit")
    bias = torch.randn(1, 4, 65, 65)
    hidden = torch.zeros(2, 1, 1, 65)
    hidden[1, ..., 50:] = torch.finfo(torch.float32).min
    calls: list[AttentionCall] = []
    tokens = torch.randn(2, 4, 65, 8)
    with Host(model, ADAPTER).watch({"layers.0.attention": calls.append}):
        latte_attention_forward(model.get_submodule("layers.0.attention"), tokens, tokens, tokens, bias + hidden)
    assert calls[0].mask is not None
    assert calls[0].mask.sum(1).tolist() == [65, 50]
    torch.testing.assert_close(Exact()(calls[0]), calls[0].exact(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["beit", "sam", "t5_encoder"])
def test_a_biased_hybrid_compiled_computes_what_it_does_eagerly(name: str) -> None:
    model, inputs = build(name), BY_NAME[name].inputs()
    inputs.pop("attention_mask", None)
    kernels = {
        site.name: NearFarKernel(site.heads, site.head_dim, window=2, halo=1, clusters=4)
        for site in Host.of(model).sites() if site.eligible
    }  # fmt: skip
    with torch.no_grad():
        exact = model(**inputs).last_hidden_state
        apply(model, ADAPTER, kernels)
        expected = model(**inputs).last_hidden_state
        assert float((expected - exact).abs().max()) > 1e-3
        torch.compiler.reset()
        actual = torch.compile(model, backend="aot_eager")(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


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
