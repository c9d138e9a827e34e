"""Attention by feature maps: its sums, and the kernels that are a feature map against their specifications."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from comparing import DIM, HEADS, some_mask, tokens
from reference.common import visible_keys
from reference.elu import elu_reference
from reference.performer import performer_reference
from reference.qt_vit import qt_vit_reference
from reference.relu import relu_reference
from reference.taylor2 import taylor2_reference
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from latte_convert.attention import CallShape
from latte_convert.kernels.linear import CAUSAL_CHUNK, linear_attention, linear_flops

SCALE = 0.3
SHAPES = [(1, 1), (7, 7), (130, 130), (5, 70), (70, 5), (64, 192)]
NARROW = (torch.float32, torch.float16, torch.bfloat16)
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "elu": lambda kernel, *qkv, scale, **call: elu_reference(*qkv, **call),
    "relu": lambda kernel, *qkv, scale, **call: relu_reference(*qkv, **call),
    "qt_vit": lambda kernel, *qkv, **call: qt_vit_reference(*qkv, **call),
    "taylor2": lambda kernel, *qkv, **call: taylor2_reference(*qkv, alpha=kernel.alpha, **call),
    "performer": lambda kernel, *qkv, **call: performer_reference(*qkv, projection=kernel.projection, **call),
}
every_kernel = pytest.mark.parametrize("name", sorted(REFERENCES))
both_forms = pytest.mark.parametrize("causal", [False, True])


# --- the kernels ---


# --- the sums ---


def test_two_keys_by_hand() -> None:
    """Weights 2·1 + 1·1 = 3 and 2·0 + 1·5 = 5."""
    query = torch.tensor([[[[2.0, 1.0]]]])
    key = torch.tensor([[[[1.0, 1.0], [0.0, 5.0]]]])
    value = torch.tensor([[[[8.0], [16.0]]]])
    assert linear_attention(query, key, value).item() == pytest.approx((3 * 8 + 5 * 16) / 8)
    assert linear_attention(query, key, value, eps=2.0).item() == pytest.approx((3 * 8 + 5 * 16) / 10)
    first = linear_attention(query, key, value, mask=torch.tensor([[True, False]]))
    assert first.item() == pytest.approx(8.0)


@pytest.mark.parametrize(("masked", "causal"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(("queries", "keys"), [*SHAPES, (CAUSAL_CHUNK + 1, CAUSAL_CHUNK)])
def test_features_weigh_the_values(queries: int, keys: int, masked: bool, causal: bool) -> None:
    phi_q, phi_k, value = (t.double().abs() for t in tokens(queries, keys))
    mask = some_mask(keys) if masked else None
    weights = (phi_q @ phi_k.mT) * visible_keys(phi_q, phi_k, mask, causal)
    expected = weights @ value / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    actual = linear_attention(phi_q, phi_k, value, mask=mask, causal=causal)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@both_forms
def test_features_in_half_precision_are_summed_in_float32(causal: bool) -> None:
    ones = torch.ones(1, 1, 5000, 1, dtype=torch.float16)  # 2049 is no float16
    value = torch.arange(5000.0).reshape(1, 1, -1, 1)
    out = linear_attention(ones, ones, value, causal=causal)
    assert out.dtype is torch.float32
    assert out[0, 0, -1].item() == pytest.approx(4999 / 2)


@both_forms
def test_a_zero_divisor_gives_zeros_and_finite_gradients(causal: bool) -> None:
    """Features 1 and -1 cancel in the divisor, though not in the numerator."""
    query = torch.ones(1, 1, 2, 1, requires_grad=True)
    key = torch.tensor([[[[1.0], [-1.0]]]], requires_grad=True)
    value = torch.tensor([[[[1.0], [5.0]]]], requires_grad=True)
    out = linear_attention(query, key, value, causal=causal)
    assert out[0, 0, 1].item() == 0
    gradients = torch.autograd.grad(out.sum(), [query, key, value])
    assert all(g.isfinite().all() for g in gradients)


@both_forms
def test_flops_of_the_sums(causal: bool) -> None:
    phi_q, phi_k, value = torch.rand(1, HEADS, 70, 11), torch.rand(1, HEADS, 150, 11), torch.rand(1, HEADS, 150, 6)
    with FlopCounterMode(display=False) as counter:
        linear_attention(phi_q, phi_k, value, causal=causal)
    assert linear_flops(CallShape(70, 150, HEADS, DIM, 6, causal=causal), 11) == counter.get_total_flops()
