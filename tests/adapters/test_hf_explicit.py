"""Table Transformer's attention, which is read although it computes by hand."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from helpers import ADAPTER, Exact, assert_same, eligible, exact_handlers, latte_kernels
from tiny_models import BY_NAME, build
from torch import Tensor, nn

from latte_convert.adapters.convert import apply
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall
from latte_convert.errors import CheckpointError

ENCODER, CROSS = "encoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"


def _run(model: nn.Module, **options: Any) -> Any:
    with torch.no_grad():
        return model(**BY_NAME["table_transformer"].inputs(), **options)


def _pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def test_masks_scale_and_exact_of_a_padded_batch() -> None:
    model = build("table_transformer")
    calls: dict[str, AttentionCall] = {}
    with Host(model, ADAPTER).watch(
        {name: lambda call, name=name: calls.update({name: call}) for name in (ENCODER, CROSS)}
    ):
        _run(model)
    for name, scale in ((ENCODER, 8**-0.5), (CROSS, 16**-0.5)):
        call = calls[name]
        assert (call.obstacle, call.causal, call.dropout, call.scale) == (None, False, 0.0, scale)
        counts = call.mask.sum(1).tolist()
        assert counts[0] == call.key.shape[2] > counts[1] > 0
        torch.testing.assert_close(Exact()(call), call.exact(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("additive", [False, True])
def test_true_in_a_boolean_mask_ignores(additive: bool) -> None:
    model = build("table_transformer")
    module = model.get_submodule(CROSS)
    hidden, memory, where = torch.randn(2, 3, 32), torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    ignored = torch.zeros(2, 1, 3, 5, dtype=torch.bool)
    ignored[1, ..., 3:] = True
    mask = torch.zeros(2, 1, 3, 5).masked_fill(ignored, torch.finfo(torch.float32).min) if additive else ignored
    arguments = (hidden, mask, torch.randn(2, 3, 32), memory, where)
    expected, _ = module(*arguments)
    masks: list[Any] = []

    def attend(call: AttentionCall) -> Tensor:
        masks.append(call.mask.tolist())
        return Exact()(call)

    with Host(model, ADAPTER).watch({CROSS: attend}):
        actual, weights = module(*arguments)
    assert masks == [[[True] * 5, [True] * 3 + [False] * 2]]
    assert weights is None
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    with Host(model, ADAPTER).watch({CROSS: lambda call: call.exact()}):
        torch.testing.assert_close(module(*arguments)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_bias_is_an_obstacle() -> None:
    model = build("table_transformer")
    hidden, calls = torch.randn(1, 3, 32), []
    mask = torch.randn(1, 1, 3, 3)
    module = model.get_submodule(ENCODER)
    expected, _ = module(hidden, mask, hidden)
    with Host(model, ADAPTER).watch({ENCODER: calls.append}):
        assert torch.equal(module(hidden, mask, hidden)[0], expected)
    assert "carries a bias" in calls[0].obstacle
    torch.testing.assert_close(
        module.out_proj(calls[0].exact().transpose(1, 2).flatten(2)), expected, rtol=1e-5, atol=1e-6
    )


def test_weights_come_from_the_original_alone() -> None:
    model = build("table_transformer")
    expected = _run(model, output_attentions=True)
    with Host(model, ADAPTER).watch({name: lambda call: None for name in eligible(model)}):
        assert_same(_run(model, output_attentions=True), expected, tolerance=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
def test_copies_and_undo(duplicate: Any) -> None:
    model = build("table_transformer")
    attributes = {name: list(module.__dict__) for name, module in model.named_modules()}
    original = _run(model)
    applied = apply(model, ADAPTER, latte_kernels(model))
    converted = _run(model)
    assert not torch.equal(converted.last_hidden_state, original.last_hidden_state)
    twin = duplicate(model)
    applied.undo()
    assert {name: list(module.__dict__) for name, module in model.named_modules()} == attributes
    assert_same(_run(model), original, tolerance=0)
    assert_same(_run(twin), converted, tolerance=0)


def test_the_latest_route_computes() -> None:
    model = build("table_transformer")
    first, second = Exact(), Exact()
    undo = ADAPTER.route(model, ENCODER, first)
    with Host(model, ADAPTER).watch({ENCODER: second}):
        assert all(site.eligible for site in Host.of(model).sites())
        _run(model)
    _run(model)
    assert (first.calls, second.calls) == (1, 1)
    undo()
    assert type(model.get_submodule(ENCODER)) is type(build("table_transformer").get_submodule(ENCODER))


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    model = build("table_transformer")
    apply(model, ADAPTER, latte_kernels(model, eligible(model)[::2]))
    expected = _run(model)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        assert_same(compiled(**BY_NAME["table_transformer"].inputs()), expected)


def test_dropout_in_training_mode() -> None:
    model = build("table_transformer")
    for name in eligible(model):
        model.get_submodule(name).dropout = 0.25
    calls: list[AttentionCall] = []
    with Host(model.train(), ADAPTER).watch({ENCODER: calls.append}):
        model(**BY_NAME["table_transformer"].inputs())
    assert calls[0].dropout == 0.25
    assert not torch.equal(calls[0].exact(), calls[0].exact())
    apply(model, ADAPTER, latte_kernels(model))
    with pytest.raises(CheckpointError, match=r"attention dropout of 0\.25"):
        model(**BY_NAME["table_transformer"].inputs())


@pytest.mark.parametrize("change", ["subclass", "forward", "patched", "projection"])
def test_anything_else_computes_attention_itself(change: str) -> None:
    model = build("table_transformer")
    module: Any = model.get_submodule(ENCODER)
    kind = type(module)
    if change == "subclass":
        module.__class__ = type("OtherAttention", (kind,), {})
    elif change == "forward":
        module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, hidden_states: (hidden_states, None)})
    elif change == "patched":
        module.forward = lambda *args, **kwargs: kind.forward(module, *args, **kwargs)
    else:
        module.qkv_proj, module.q_proj = module.q_proj, None
    sites = {site.name: site for site in Host.of(model).sites()}
    assert "computes attention itself" in (sites[ENCODER].reason or "")
    assert sites[CROSS].eligible


def test_half_precision_runs() -> None:
    model = build("table_transformer")
    apply(model, ADAPTER, latte_kernels(model))
    expected = _run(model).last_hidden_state
    inputs = BY_NAME["table_transformer"].inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = model(**inputs).last_hidden_state
        with Host(model, ADAPTER).watch(exact_handlers(eligible(model))):
            assert model(**inputs).last_hidden_state.isfinite().all()
    assert (actual.float() - expected).norm() / expected.norm() < 0.1
