"""PyTorch's own attention, encoder and decoder: fused paths off while routed, masks read right, everything put back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from helpers import Exact, exact_handlers, latte_kernels
from torch import Tensor, nn

import latte_convert
from latte_convert.adapters.convert import apply
from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.adapters.mha import TorchAdapter
from latte_convert.attention import AttentionCall
from latte_convert.errors import CheckpointError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

ADAPTER = TorchAdapter()
TRIANGLE = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)  # True ignores
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
SETTINGS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False, "batch_first": True},
    "odd_heads": {"num_heads": 3, "embed_dim": 12, "batch_first": True},
    "other_sources": {"kdim": 6, "vdim": 10},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDED},
    "float padding": {"key_padding_mask": PADDED.float() * -1e9},
    "causal": {"attn_mask": TRIANGLE},
    "causal with hint": {"attn_mask": TRIANGLE, "is_causal": True},
    "float causal": {"attn_mask": torch.zeros(5, 5).masked_fill(TRIANGLE, float("-inf"))},
    "causal and padding": {"attn_mask": TRIANGLE, "key_padding_mask": PADDED},
    "padding by query": {"attn_mask": PADDED},
}


class Holder(nn.Module):
    """A model with one attention module in it."""

    def __init__(self, embed_dim: int = 16, num_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, **options)
        with torch.no_grad():
            for parameter in self.attn.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attn(*args, **kwargs)


def _inputs(module: nn.MultiheadAttention, queries: int = 5, keys: int = 5) -> list[Tensor]:
    sizes = [(queries, module.embed_dim), (keys, module.kdim), (keys, module.vdim)]
    if queries == keys and module._qkv_same_embed_dim:
        x = torch.randn(2, *sizes[0])
        inputs = [x] * 3
    else:
        inputs = [torch.randn(2, *size) for size in sizes]
    if module.batch_first:
        return inputs
    turned = {id(x): x.transpose(0, 1) for x in inputs}
    return [turned[id(x)] for x in inputs]


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("need_weights", [True, False])
@torch.no_grad()
def test_exact_kernel_gives_the_original(setting: str, masks: str, need_weights: bool) -> None:
    model = Holder(**SETTINGS[setting]).eval()
    inputs = _inputs(model.attn)
    options = {**MASKS[masks], "need_weights": need_weights}
    if masks == "padding by query":
        heads = model.attn.num_heads
        options["attn_mask"] = PADDED[:, None].repeat_interleave(heads, 0).expand(2 * heads, 5, 5)
    expected, _ = model(*inputs, **options)
    handler = Exact()
    with Host(model, ADAPTER).watch({"attn": handler}):
        actual, weights = model(*inputs, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (handler.calls, weights is not None) == (1, need_weights)


@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_cross_attention_and_unbatched_inputs(batch_first: bool) -> None:
    model = Holder(batch_first=batch_first).eval()
    cross = _inputs(model.attn, queries=3, keys=7)
    rows = [torch.randn(3, 16), torch.randn(7, 16), torch.randn(7, 16)]
    ignored = torch.tensor([False] * 5 + [True] * 2)
    handler = Exact()
    for inputs, options in ((cross, {}), (rows, {}), (rows, {"key_padding_mask": ignored})):
        expected, _ = model(*inputs, **options)
        with Host(model, ADAPTER).watch({"attn": handler}):
            actual, _ = model(*inputs, **options)
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert handler.calls == 3


@torch.no_grad()
def test_what_a_handler_is_told() -> None:
    model = Holder(batch_first=True).eval()
    seen: list[AttentionCall] = []

    def watch(call: AttentionCall) -> Tensor:
        seen.append(call)
        return call.exact()

    x = torch.randn(2, 5, 16)
    with Host(model, ADAPTER).watch({"attn": watch}):
        model(x, x, x, key_padding_mask=PADDED)
        model(x, x, x, attn_mask=TRIANGLE, key_padding_mask=PADDED)
        model(x, x, x, attn_mask=torch.zeros(5, 5))
    assert [call.causal for call in seen] == [False, True, False]
    assert all(call.query.shape == call.key.shape == call.value.shape == (2, 4, 5, 4) for call in seen)
    assert all(call.scale == 0.5 and call.obstacle is None for call in seen)
    assert torch.equal(seen[0].mask, ~PADDED)
    assert torch.equal(seen[1].mask, ~PADDED)
    weight, bias = model.attn.in_proj_weight.chunk(3)[0], model.attn.in_proj_bias.chunk(3)[0]
    torch.testing.assert_close(seen[0].query[1, 2, 3], (x[1, 3] @ weight.T + bias)[8:12])


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": TRIANGLE.T.contiguous() | TRIANGLE.roll(2, 1)},
        {"is_causal": True},
    ],
    ids=["pattern", "hint without a mask"],
)
@torch.no_grad()
def test_other_masks_are_obstacles(options: dict[str, Any]) -> None:
    model = Holder(batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    found: list[str | None] = []
    with Host(model, ADAPTER).watch({"attn": lambda call: found.append(call.obstacle) or call.exact()}):
        actual, _ = model(x, x, x, **options)
    assert found[0]
    if "is_causal" not in options:
        torch.testing.assert_close(actual, model(x, x, x, **options)[0], rtol=1e-5, atol=1e-5)
    applied = apply(model, ADAPTER, latte_kernels(model))
    with pytest.raises(CheckpointError, match=r"^attn: .*; exclude this site"):
        model(x, x, x, **options)
    applied.undo()


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.randn(5, 5)},
        {"attn_mask": torch.randn(8, 5, 5), "key_padding_mask": torch.zeros(2, 5).masked_fill(PADDED, float("-inf"))},
        {"key_padding_mask": torch.full((2, 5), -0.5)},
    ],
)
@torch.no_grad()
def test_a_bias_comes_with_the_call(options: dict[str, Any]) -> None:
    model = Holder(batch_first=True).eval()
    x, handler = torch.randn(2, 5, 16), exact_handlers(["attn"])["attn"]
    expected, _ = model(x, x, x, **options)
    with Host(model, ADAPTER).watch({"attn": handler}):
        torch.testing.assert_close(model(x, x, x, **options)[0], expected, rtol=1e-5, atol=1e-5)
    with (
        apply(model, ADAPTER, latte_kernels(model)),
        pytest.raises(CheckpointError, match=r"^attn: .* no form for a bias"),
    ):
        model(x, x, x, **options)


@torch.no_grad()
def test_a_handler_that_passes_leaves_bits_and_weights() -> None:
    model = Holder(batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    for average in (True, False):
        expected = model(x, x, x, average_attn_weights=average)
        with Host(model, ADAPTER).watch({"attn": lambda call: None}):
            actual = model(x, x, x, average_attn_weights=average)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


def test_dropout_is_reported_and_gradients_flow() -> None:
    model = Holder(batch_first=True, dropout=0.25).train()
    seen: list[float] = []
    x = torch.randn(2, 5, 16, requires_grad=True)
    with Host(model, ADAPTER).watch({"attn": lambda call: seen.append(call.dropout) or call.exact()}):
        model(x, x, x)[0].sum().backward()
    assert seen == [0.25]
    assert model.attn.in_proj_weight.grad.abs().sum() > 0
    apply(model, ADAPTER, latte_kernels(model))
    with pytest.raises(CheckpointError, match=r"dropout of 0\.25"):
        model(x, x, x)


def _encoder(layers: int = 3, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    nested = not options.get("norm_first", False)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(16), enable_nested_tensor=nested).eval()


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"src_key_padding_mask": PADDED},
        {"mask": TRIANGLE},
        {"mask": TRIANGLE, "src_key_padding_mask": PADDED},
    ],
    ids=["none", "padding", "causal", "both"],
)
@torch.no_grad()
def test_fused_encoders_call_every_site(options: dict[str, Any], masks: dict[str, Tensor]) -> None:
    model, x = _encoder(**options), torch.randn(2, 5, 16)
    handlers = exact_handlers(site.name for site in Host.of(model).sites())
    expected = model(x, **masks)
    with Host(model, ADAPTER).watch(handlers):
        actual = model(x, **masks)
    assert [handler.calls for handler in handlers.values()] == [1, 1, 1]  # type: ignore[attr-defined]
    # Padded tokens included: a nested batch leaves zeros there, and so must the routed one.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(x, **masks), expected)


@torch.no_grad()
def test_one_routed_layer_among_fused_ones() -> None:
    model, x = _encoder(), torch.randn(2, 5, 16)
    handler = Exact()
    expected = model(x, src_key_padding_mask=PADDED)
    with Host(model, ADAPTER).watch({"layers.1.self_attn": handler}):
        torch.testing.assert_close(model(x, src_key_padding_mask=PADDED), expected, rtol=1e-5, atol=1e-5)
    assert handler.calls == 1


@torch.no_grad()
def test_padding_changes_nothing_for_the_kernel() -> None:
    model, x = _encoder(), torch.randn(2, 5, 16)
    apply(model, ADAPTER, latte_kernels(model))
    padded = model(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(padded[1, :3], model(x[1:, :3])[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_encoder_and_decoder() -> None:
    model = nn.Transformer(16, 4, 2, 2, 32, batch_first=True).eval()
    sites = {site.name: site for site in Host.of(model).sites()}
    assert (sites["encoder.layers.0.self_attn"].tower, sites["encoder.layers.0.self_attn"].kind) == ("encoder", "self")
    cross = sites["decoder.layers.1.multihead_attn"]
    assert (cross.tower, cross.kind, cross.causal) == ("decoder", "cross", False)
    handlers = exact_handlers(sites)
    source, target = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    masks = {"tgt_mask": TRIANGLE, "src_key_padding_mask": PADDED, "memory_key_padding_mask": PADDED}
    expected = model(source, target, **masks)
    with Host(model, ADAPTER).watch(handlers):
        torch.testing.assert_close(model(source, target, **masks), expected, rtol=1e-5, atol=1e-5)
    assert [handler.calls for handler in handlers.values()] == [1] * 6  # type: ignore[attr-defined]
    apply(model, ADAPTER, latte_kernels(model))
    before = model(source, target, **masks)
    target[:, -1] += 1
    torch.testing.assert_close(model(source, target, **masks)[:, :-1], before[:, :-1], rtol=1e-5, atol=1e-5)


def _traces(model: nn.Module) -> list[Any]:
    return [(name, type(m), list(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()]


@torch.no_grad()
def test_undo_leaves_nothing_behind() -> None:
    model, x = _encoder(), torch.randn(2, 5, 16)
    before, expected = _traces(model), model(x)
    applied = apply(model, ADAPTER, latte_kernels(model))
    undo = ADAPTER.route(model, "layers.0.self_attn", Exact())
    assert not torch.equal(model(x), expected)
    applied.undo()
    undo()
    undo()
    assert _traces(model) == before
    assert torch.equal(model(x), expected)


def _pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
@torch.no_grad()
def test_copies_of_a_converted_model(duplicate: Any) -> None:
    model, x = _encoder(), torch.randn(2, 5, 16)
    original = model(x)
    applied = apply(model, ADAPTER, latte_kernels(model))
    converted = model(x)
    twin = duplicate(model)
    applied.undo()
    assert torch.equal(model(x), original)
    assert torch.equal(twin(x), converted)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_graph() -> None:
    model, x = _encoder(layers=1), torch.randn(2, 5, 16)
    apply(model, ADAPTER, latte_kernels(model))
    expected = model(x, src_key_padding_mask=PADDED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual = compiled(x, src_key_padding_mask=PADDED)
    # Compiled encoders do not pack into nested tensors, so that only the valid tokens are told to agree.
    torch.testing.assert_close(actual[~PADDED], expected[~PADDED], rtol=1e-5, atol=1e-5)
    alone = torch.compile(model.layers[0], backend="aot_eager")
    causal = model.layers[0](x, src_mask=TRIANGLE, is_causal=True)
    torch.testing.assert_close(alone(x, src_mask=TRIANGLE, is_causal=True), causal, rtol=1e-5, atol=1e-5)


class _Own(nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, value)


def test_what_cannot_be_converted_says_why() -> None:
    model = nn.ModuleDict({
        "text_bias": nn.MultiheadAttention(16, 4, add_bias_kv=True),
        "visual_zero": nn.MultiheadAttention(16, 4, add_zero_attn=True),
        "own": _Own(16, 4),
        "patched": nn.MultiheadAttention(16, 4),
        "good": nn.MultiheadAttention(16, 4, kdim=8),
    })  # fmt: skip
    model["patched"].forward = lambda *args: None
    sites = {site.name: site for site in Host.of(model).sites()}
    assert {name: site.reason for name, site in sites.items()} == {
        "text_bias": "a learned extra key and value (add_bias_kv)",
        "visual_zero": "an extra key and value of zeros (add_zero_attn)",
        "own": "_Own has a forward of its own",
        "patched": "its forward was replaced by something else",
        "good": None,
    }
    assert [site.tower for site in sites.values()] == ["text", "vision", "model", "model", "model"]
    assert sites["good"].kind == "cross"
    assert find_adapter(model).output_projection(model, "good") is model["good"].out_proj


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"use torch\.nn\.MultiheadAttention"):
        find_adapter(nn.Linear(2, 2))


def test_conversion_of_a_model_in_memory(tmp_path: Any) -> None:
    model = _encoder()
    batches = [{"src": torch.randn(2, 5, 16), "src_key_padding_mask": PADDED} for _ in range(6)]
    result = latte_convert.convert(model, batches, recipe=Recipe(kernel="latte", samples=6, ratio=0.67))
    assert len(result.report.converted) == 2
    assert result.report.fidelity.outputs["output"].cosine > 0.5
    assert sum(key.endswith(".latte.alpha") for key in model.state_dict()) == 2
    result.save(tmp_path / "hybrid")
    loaded = latte_convert.load(tmp_path / "hybrid", model=_encoder())
    with torch.no_grad():
        assert torch.equal(loaded(**batches[0]), model(**batches[0]))


@torch.no_grad()
def test_a_packed_batch_of_nothing_but_padding() -> None:
    """It has no token at all: nothing to attend to, and nothing to put out."""
    model, x = _encoder(), torch.randn(2, 5, 16)
    with Host(model, ADAPTER).watch(exact_handlers(site.name for site in Host.of(model).sites())):
        some = model(x, src_key_padding_mask=PADDED)
        nothing = model.layers[0].self_attn(*[torch.nested.nested_tensor([x[0, :0], x[1, :0]])] * 3)[0]
    assert some.isfinite().all()
    assert [len(row) for row in nothing.unbind()] == [0, 0]
