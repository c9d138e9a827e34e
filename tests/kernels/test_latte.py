"""The latte kernel against its specification, and the laws every attention operator obeys."""

from __future__ import annotations

import pytest
import torch
from comparing import DIM, HEADS, assert_close, attend, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import latte_reference
from torch import Tensor

from latte_convert.kernels.latte.kernel import LatteKernel, latte_attention

SHAPES = [(1, 1), (7, 7), (130, 130), (5, 70), (70, 5), (64, 192)]
quick = settings(deadline=None, max_examples=8, derandomize=True)
seeds = st.integers(0, 2**16)


def scalars(groups: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    names = ("delta_q", "delta_k", "beta_q", "beta_k")
    drawn = {name: (torch.rand(groups) + 0.5).to(dtype) for name in names}
    return {"alpha": (torch.rand(groups) * 2 - 1).to(dtype), **drawn}


# --- parity with the specification ---


def test_one_head_by_hand() -> None:
    """Two keys, one channel: psi(q) = 4, psi(k) = 1, 9, all normalised to 1, so Sim = 2·1 + 0.5 for both."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [2.0]]]])
    value = torch.tensor([[[[1.0], [5.0]]]])
    one = torch.ones(1)
    call = {"alpha": 0 * one, "delta_k": one, "beta_q": one, "beta_k": 0.5 * one, "scale": 1.0, "eps": 0.0}
    assert attend(latte_attention, query, key, value, delta_q=2 * one, **call).item() == pytest.approx(3.0)
    # Without normalisation Sim = 2·4·1 + 0.5 = 8.5 and 2·4·9 + 0.5 = 72.5.
    plain = attend(latte_attention, query, key, value, delta_q=2 * one, jpn=False, **call)
    assert plain.item() == pytest.approx((8.5 * 1 + 72.5 * 5) / 81)


# --- laws ---


@given(seed=seeds, factor=st.floats(0.05, 20), jpn=st.booleans(), causal=st.booleans())
@quick
def test_only_the_ratio_of_delta_and_beta_matters(seed: int, factor: float, jpn: bool, causal: bool) -> None:
    torch.manual_seed(seed)
    inputs, parameters = tokens(20, 20), scalars()
    scaled = {
        **parameters,
        "delta_q": parameters["delta_q"] * factor,
        "beta_k": parameters["beta_k"] * factor,
    }
    call = {"scale": 0.3, "jpn": jpn, "causal": causal}
    assert_close(
        attend(latte_attention, *inputs, **scaled, **call), attend(latte_attention, *inputs, **parameters, **call), 1e-5
    )


# --- numerics ---


@pytest.mark.parametrize("zero", ["delta_q", "beta_k"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_zero_product_stays_finite(zero: str, causal: bool) -> None:
    inputs = [t.requires_grad_() for t in tokens(9, 9)]
    parameters = {**scalars(), zero: torch.zeros(1)}
    out = attend(latte_attention, *inputs, **parameters, scale=0.3, causal=causal)
    assert_close(out, latte_reference(*inputs, **parameters, scale=0.3, causal=causal), 1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


def test_the_gradient_is_finite_at_the_largest_anchor() -> None:
    parameters = {**scalars(), "alpha": torch.ones(1, requires_grad=True)}
    out = attend(latte_attention, *tokens(9, 9), **parameters, scale=0.3)
    out.square().sum().backward()
    assert parameters["alpha"].grad is not None
    assert parameters["alpha"].grad.isfinite().all()


# --- the module ---


def heads_of(count: int, dim: int = DIM) -> list[Tensor]:
    return [torch.randn(2, HEADS, count, dim) for _ in range(3)]


def test_equal_values_per_head_equal_one_per_layer() -> None:
    layer, head = LatteKernel(HEADS, DIM), LatteKernel(HEADS, DIM, granularity="head")
    values = {"alpha": -0.7, "delta_q": 1.3, "delta_k": 0.8, "beta_q": 0.6, "beta_k": 1.1}
    with torch.no_grad():
        for name, value in values.items():
            assert getattr(layer, name).shape == (1,)
            assert getattr(head, name).shape == (HEADS,)
            getattr(layer, name).fill_(value)
            getattr(head, name).fill_(value)
    inputs = heads_of(9)
    assert_close(attend(head, *inputs, scale=0.3), attend(layer, *inputs, scale=0.3), 1e-6)


def test_without_tte_the_anchor_is_not_read() -> None:
    fixed, zero = LatteKernel(HEADS, DIM, tte=False), LatteKernel(HEADS, DIM)
    with torch.no_grad():
        fixed.alpha.fill_(float("nan"))
    inputs = heads_of(9)
    assert_close(attend(fixed, *inputs, scale=0.3), attend(zero, *inputs, scale=0.3), 1e-6)


def test_every_parameter_can_be_fine_tuned() -> None:
    kernel = LatteKernel(HEADS, DIM, granularity="head", sigma=True)
    attend(kernel, *heads_of(9), scale=0.3).square().sum().backward()
    names = {"alpha", "delta_q", "delta_k", "beta_q", "beta_k", "sigma"}
    assert {n for n, p in kernel.named_parameters() if p.grad is not None and p.grad.any()} == names
    assert all(p.dtype is torch.float32 for p in kernel.parameters())
