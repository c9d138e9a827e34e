"""Polarity-aware attention against its pairwise specification and the laws of linear attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import (
    DIM,
    HEADS,
    TOLERANCE,
    assert_close,
    attend,
    tokens,
)
from reference.pola import pola_reference
from torch import Tensor

from latte_convert.attention import AttentionCall
from latte_convert.kernels.rivals.pola import PolaKernel

SHAPES = [(1, 1), (7, 7), (67, 67), (5, 70), (70, 5)]


def exponents() -> Tensor:
    """One for each channel, over the published range."""
    return 1 + 4 * torch.rand(HEADS, DIM)


def pola(*qkv: Tensor, power: Tensor, **call: Any) -> Tensor:
    return torch.func.functional_call(PolaKernel(*power.shape), {"power": power}, AttentionCall(*qkv, **call))


# --- parity with the specification ---


def test_one_query_by_hand() -> None:
    """Channel products 2 and -3 with the first key, -2 and 6 with the second; power 2.

    Same-signed weights 4 and 36, opposite-signed 9 and 4.
    """
    query, key = torch.tensor([[[[1.0, 3.0]]]]), torch.tensor([[[[2.0, -1.0], [-2.0, 2.0]]]])
    value = torch.tensor([[[[1.0, 1.0], [0.0, 0.0]]]])
    out = pola(query, key, value, power=torch.full((1, 2), 2.0), scale=1.0)
    assert out.flatten().tolist() == pytest.approx([4 / 40, 9 / 13])


# --- laws ---


def test_a_negated_query_swaps_the_streams() -> None:
    query, key, value = tokens(9, 9)
    value = value[..., :6]
    call = {"power": exponents(), "scale": 0.5}
    expected = pola(query, key, value, **call).roll(3, dims=-1)
    assert_close(pola(-query, key, value.roll(3, dims=-1), **call), expected, 1e-5)


def test_the_scale_matters_only_where_exponents_differ_inside_a_head() -> None:
    inputs = tokens(9, 9)
    even, uneven = exponents()[:, :1].expand(-1, DIM), exponents()
    one, other = (pola(*inputs, power=even, scale=scale) for scale in (0.1, 3.0))
    assert_close(one, other, 1e-5)
    one, other = (pola(*inputs, power=uneven, scale=scale) for scale in (0.1, 3.0))
    assert not torch.allclose(one, other, atol=1e-3)


def test_a_larger_power_is_sharper() -> None:
    query, key = tokens(20, 20)[:2]
    identity = torch.eye(20).repeat(1, 2).expand(2, HEADS, -1, -1)
    largest = []
    for power in (1.0, 2.0, 4.0):
        out = pola(query, key, identity, power=torch.full((HEADS, DIM), power), scale=0.5)
        largest.append(out.unflatten(-1, (2, 20)).amax(-1).mean(2).min())
    assert (torch.stack(largest).diff() > 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_stream_without_a_channel_of_its_sign_is_zero(causal: bool) -> None:
    query, key, value = (t.abs() for t in tokens(9, 9))
    query[:, :, 3] = 0
    inputs = [t.requires_grad_() for t in (query, key, value)]
    out = pola(*inputs, power=exponents(), scale=0.5, causal=causal)
    assert not out[..., 4:].any()
    assert not out[:, :, 3].any()
    assert (out[:, :, 4:, :4] > 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


# --- numerics ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_half_precision_tokens_stay_finite_and_accurate(causal: bool, dtype: torch.dtype) -> None:
    inputs = [(t * factor).to(dtype) for t, factor in zip(tokens(300, 300), (1e4, 1e4, 1.0), strict=True)]
    call = {"power": torch.full((HEADS, DIM), 5.0), "scale": 1.0, "causal": causal}
    exact = pola_reference(*(t.double() for t in inputs), **call)
    assert_close(pola(*inputs, **call), exact.to(dtype), TOLERANCE[dtype])


# --- the module ---


def test_sigma_gates_each_stream() -> None:
    kernel, plain = PolaKernel(HEADS, DIM, sigma=True), PolaKernel(HEADS, DIM)
    assert kernel.sigma is not None
    inputs = [torch.randn(2, HEADS, 9, DIM) for _ in range(3)]
    with torch.no_grad():
        kernel.sigma.unflatten(0, (HEADS, 2, DIM // 2))[:, 1] = 0
    out = attend(kernel, *inputs, scale=0.5)
    assert_close(out[..., : DIM // 2], attend(plain, *inputs, scale=0.5)[..., : DIM // 2], 1e-6)
    assert not out[..., DIM // 2 :].any()


def test_the_scalar_is_the_mean_power_of_each_head() -> None:
    kernel = PolaKernel(HEADS, DIM)
    with torch.no_grad():
        kernel.power.copy_(torch.tensor([1.5, 2.0, 4.0])[:, None].expand(-1, DIM))
        kernel.power[0, 0] = 5.5
    torch.testing.assert_close(kernel.scalars(), {"power": torch.tensor([2.0, 2.0, 4.0])})
