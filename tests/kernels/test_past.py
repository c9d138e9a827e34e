"""near_past: near_far's causal form against its definition, what it never sees, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from reference.past import blocks_of, past_reference
from reference.softmax import softmax_reference
from torch import Tensor

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels.near_far import causal
from latte_convert.kernels.near_far.causal import NearPastKernel
from latte_convert.kernels.near_far.kernel import near_far_attention
from latte_convert.kernels.near_far.past import Past
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.flops import measured_flops

HEADS, DIM, SCALE = 2, 20, 0.4
CASES = [  # tokens, window, clusters, steps
    (37, 2, 6, 1),
    (64, 2, 20, 0),
    (23, 1, 9, 2),
    (40, 2, 1, 1),
    (7, 2, 4, 1),
    (4, 2, 4, 1),
    (1, 3, 4, 1),
]


def tokens(count: int, *, value_dim: int = DIM, dtype: Any = torch.float64) -> list[Tensor]:
    """Query, key and value; queries have a mean, as in real models."""
    torch.manual_seed(count)
    query, key, value = (torch.randn(2, HEADS, count, d, dtype=torch.float64) for d in (DIM, DIM, value_dim))
    return [x.to(dtype) for x in (query + 1, key, value)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_the_reference(case: tuple[int, ...], masked: bool) -> None:
    count, window, clusters, steps = case
    inputs = [x.requires_grad_() for x in tokens(count, value_dim=6)]
    mask = None
    if masked:
        mask = torch.rand(2, count) > 0.4
        mask[0] = False
    call = {"scale": SCALE, "mask": mask, "clusters": clusters, "steps": steps}
    actual = near_far_attention(*inputs, window=window, causal=True, **call)
    expected = past_reference(*inputs, window=window**2, channels=16, **call)
    expected = expected if mask is None else expected.masked_fill(~mask.any(1)[:, None, None, None], 0)
    # Before its first visible key a query sees none: there the form promises finite numbers only.
    rows = torch.ones(2, count, dtype=torch.bool) if mask is None else mask.cumsum(1) > 0
    rows = rows[:, None, :, None]
    assert actual.isfinite().all()
    actual, expected = actual.where(rows, 0), expected.where(rows, 0)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    if count > 1:
        upstream = torch.randn_like(expected)
        gradients = (torch.autograd.grad(out, inputs, upstream) for out in (actual, expected))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("count", [1, 4, 9, 40, 130])
def test_blocks_are_past_and_leave_nothing_out(count: int) -> None:
    past = Past.of(2, 8, 1)
    levels, windows = past.levels(count), past.windows(count)
    for window in range(windows):
        found = []
        for blocks in levels:
            number = int(blocks.seen_by(windows, torch.device("cpu"))[window])
            if number < blocks.number:
                found.append(range(2 * number * blocks.size, (2 * number + 1) * blocks.size))
        assert sorted(found, key=lambda block: block.start) == blocks_of(window * past.window, past.window)
        assert sorted(token for block in found for token in block) == list(range(max(window - 1, 0) * past.window))


def test_with_as_many_clusters_as_tokens_it_is_softmax() -> None:
    inputs = tokens(60)
    out = near_far_attention(*inputs, scale=SCALE, window=2, clusters=10_000, steps=0, causal=True)
    torch.testing.assert_close(out, softmax_reference(*inputs, scale=SCALE, causal=True), rtol=1e-9, atol=1e-9)


def test_the_future_changes_no_bit_of_the_past() -> None:
    inputs = tokens(300, dtype=torch.float32)
    call = {"scale": SCALE, "window": 4, "clusters": 16, "causal": True}
    out = near_far_attention(*inputs, **call)
    for last in (1, 16, 100, 255):
        changed = [torch.cat([x[:, :, :last], 50 * torch.randn_like(x[:, :, last:])], dim=2) for x in inputs]
        torch.testing.assert_close(near_far_attention(*changed, **call)[:, :, :last], out[:, :, :last])


def test_flops_are_counted_and_grow_as_n() -> None:
    one = NearPastKernel(1, 64)
    shapes = {n: CallShape(n, n, 1, 64, 64, causal=True) for n in (64, 1024, 2048, 4096, 65536)}
    assert one.flops(shapes[64]) == softmax_flops(shapes[64])
    assert one.flops(shapes[2048]) < 0.45 * softmax_flops(shapes[2048])
    assert one.flops(shapes[65536]) < 36 * one.flops(shapes[2048])
    query = torch.randn(1, 1, 2048, 64)
    counted, _ = measured_flops(lambda: one(AttentionCall(query, query, query, 0.1, causal=True)))
    # What no counter sees: weights and sums of means and moments.
    assert 0.9 * one.flops(shapes[2048]) < counted <= one.flops(shapes[2048])


def test_generation_with_a_cache_attends_exactly() -> None:
    one = NearPastKernel(HEADS, DIM, window=2, clusters=4)
    query, key, value = tokens(100, dtype=torch.float32)
    for last in (1, 3):
        out = one(AttentionCall(query[:, :, -last:], key, value, SCALE, causal=True))
        expected = softmax_reference(query[:, :, -last:], key, value, scale=SCALE, causal=True)
        torch.testing.assert_close(out, expected)


@torch.no_grad()
def test_a_llama_reads_a_long_text_and_goes_on_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (1, 160))
    exact = model(ids).logits
    host = Host.of(model)
    lengths: list[int] = []

    def counted(query: Tensor, *rest: Any, **call: Any) -> Tensor:
        lengths.append(query.shape[2])
        return near_far_attention(query, *rest, **call)

    monkeypatch.setattr(causal, "near_far_attention", counted)
    with host.convert({site.name: NearPastKernel(2, 16, window=3, clusters=8) for site in host.sites()}):
        logits = model(ids).logits
        assert lengths == [160, 160]
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert lengths == [160] * 4  # the text only: what is generated attends by softmax
    assert not torch.allclose(logits, exact, atol=1e-3)
    torch.testing.assert_close(logits[:, :18], exact[:, :18], rtol=1e-4, atol=1e-4)  # two windows: exact
