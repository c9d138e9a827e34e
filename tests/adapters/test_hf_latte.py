"""Models with LATTE keep their promises: padding, batches, causality, dtypes, compilation, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ADAPTER, assert_same, eligible, latte_kernels
from tiny_models import BY_NAME, FAMILIES, build
from tiny_parts import pixels, text
from torch import Tensor, nn

from latte_convert.adapters.convert import Applied, apply
from latte_convert.adapters.host import Host

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _hybrid(name: str, attention: str = "sdpa", **options: Any) -> tuple[nn.Module, Applied]:
    model = build(name, attention)
    return model, apply(model, ADAPTER, latte_kernels(model), **options)


@torch.no_grad()
def _hidden(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    hidden: Tensor = model(**inputs).last_hidden_state
    return hidden


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_padding_does_not_change_valid_tokens(name: str, attention: str) -> None:
    model, _ = _hybrid(name, attention)
    inputs = text((9,))
    padded = {
        "input_ids": nn.functional.pad(inputs["input_ids"], (0, 20), value=1),
        "attention_mask": nn.functional.pad(inputs["attention_mask"], (0, 20)),
    }
    torch.testing.assert_close(_hidden(model, padded)[:, :9], _hidden(model, inputs), **CLOSE)


@pytest.mark.parametrize("name", ["bert", "dinov2"])
def test_a_batch_equals_its_singles(name: str) -> None:
    model, _ = _hybrid(name)
    inputs = text((8, 8, 5)) if name == "bert" else pixels(3)
    batch = _hidden(model, inputs)
    for row in range(3):
        single = _hidden(model, {key: value[row : row + 1] for key, value in inputs.items()})
        torch.testing.assert_close(batch[row : row + 1], single, **CLOSE)


def test_pixels_outside_the_mask_do_not_matter() -> None:
    """DETR masks the features of padding as keys of the encoder and of the decoder's cross-attention."""
    model, _ = _hybrid("detr")
    inputs = BY_NAME["detr"].inputs()
    hidden = _hidden(model, inputs)
    # Features are 8x8; the second image covers 5x6 of them. Far from its border, beyond the backbone's reach.
    other = inputs["pixel_values"].clone()
    other[1, :, 56:, 60:] += 1.0
    torch.testing.assert_close(_hidden(model, {**inputs, "pixel_values": other})[1], hidden[1], **CLOSE)
    other[1, :, :8, :8] += 1.0  # inside, it does
    assert (_hidden(model, {**inputs, "pixel_values": other})[1] - hidden[1]).abs().max() > 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_clip_text_does_not_look_ahead(attention: str) -> None:
    full = build("clip", attention)
    kernels = {name: kernel for name, kernel in latte_kernels(full).items() if name.startswith("text_model")}
    apply(full, ADAPTER, kernels)
    model = full.text_model
    for inputs in (text((12, 12)), text((12, 12), seed=2)):
        changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
        changed["input_ids"][:, -1] = (inputs["input_ids"][:, -1] - 3) % 56 + 4
        before, after = _hidden(model, inputs), _hidden(model, changed)
        torch.testing.assert_close(after[:, :-1], before[:, :-1], rtol=0, atol=0)
        assert (after[:, -1] - before[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["dinov2", "bert", "clip"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Finite, in the model's dtype, and near the float32 result; the kernel's own scalars stay float32."""
    model, _ = _hybrid(name)
    inputs = BY_NAME[name].inputs()
    key = "text_embeds" if name == "clip" else "last_hidden_state"
    with torch.no_grad():
        expected = model(**inputs)[key]
        model.to(dtype)
        actual = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()})[key]
    assert actual.dtype == dtype
    assert actual.isfinite().all()
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < (0.05 if dtype is torch.bfloat16 else 0.01)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "dinov2", "detr", "whisper"])
def test_short_sequences_run_the_original_bit_by_bit(name: str, attention: str) -> None:
    inputs = BY_NAME[name].inputs()
    with torch.no_grad():
        expected = build(name, attention)(**inputs)
        model, _ = _hybrid(name, attention, min_tokens=1000)
        assert_same(model(**inputs), expected, tolerance=0)


def test_min_tokens_counts_keys() -> None:
    original = build("bert")
    model, _ = _hybrid("bert", min_tokens=8)
    short, long = text((7,)), text((8,))
    torch.testing.assert_close(_hidden(model, short), _hidden(original, short), rtol=0, atol=0)
    assert not torch.equal(_hidden(model, long), _hidden(original, long))


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_family_runs_converted(name: str) -> None:
    model, applied = _hybrid(name)
    original = build(name)
    with torch.no_grad():
        output, expected = model(**BY_NAME[name].inputs()), original(**BY_NAME[name].inputs())
    assert applied.unused() == []
    differs = False
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert output[key].shape == value.shape
            assert output[key].isfinite().all()
            differs |= not torch.equal(output[key], value)
    assert differs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"), [("dinov2", "sdpa"), ("bert", "sdpa"), ("bert", "eager"), ("clip", "sdpa")]
)
def test_compiled_equals_eager(name: str, attention: str) -> None:
    """Half of the sites converted, so that both branches are in the graph; one graph, without breaks."""
    torch._dynamo.reset()
    model, inputs = build(name, attention), BY_NAME[name].inputs()
    apply(model, ADAPTER, latte_kernels(model, eligible(model)[::2]))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name == "dinov2")
    with torch.no_grad():
        assert_same(compiled(**inputs), model(**inputs), inputs.get("attention_mask"))


def test_gradients_flow_through_kernels_and_projections() -> None:
    model, _ = _hybrid("bert")
    model(**text()).last_hidden_state.square().sum().backward()
    for site in Host.of(model).sites():
        module = model.get_submodule(site.name)
        for name, parameter in [*module.latte.named_parameters(), *module.named_parameters()]:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        assert module.latte.alpha.grad.abs().sum() > 0
        assert module.query.weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_compiled_gradients_equal_eager_ones() -> None:
    torch._dynamo.reset()
    model, _ = _hybrid("dinov2")
    model(**pixels()).last_hidden_state.square().sum().backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(**pixels()).last_hidden_state.square().sum().backward()
    assert {name for name in expected if ".latte." in name}
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-4)
