"""FAVOR+; its parity with the specification is in test_linear.py."""

from __future__ import annotations

import statistics

import pytest
import torch
from comparing import attend
from torch import Tensor

from latte_convert.errors import UsageError
from latte_convert.kernels.rivals.performer import PerformerKernel, orthogonal_features
from latte_convert.kernels.softmax import softmax_attention


def error(features: int, *, causal: bool = False) -> float:
    """Root mean square distance from softmax, over draws of the features."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(3)]
    exact = attend(softmax_attention, *inputs, scale=0.05, causal=causal)
    kernels = (PerformerKernel(2, 8, features=features, seed=seed) for seed in range(12))
    squares = [(attend(k, *inputs, scale=0.05, causal=causal) - exact).square().mean().item() for k in kernels]
    return statistics.fmean(squares) ** 0.5


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_falls_as_the_root_of_the_features(causal: bool) -> None:
    coarse, fine = error(64, causal=causal), error(64 * 16, causal=causal)
    assert 3 < coarse / fine < 5.5  # sqrt(16) = 4
    assert fine < 0.01


def test_rows_of_a_block_are_orthogonal_with_the_lengths_of_normal_vectors() -> None:
    drawn = orthogonal_features(40, 16, seed=0).double()  # two blocks and half of one
    for block in drawn.split(16):
        products = block @ block.mT
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-5)
    squares = orthogonal_features(16 * 500, 16, seed=1).double().square().sum(-1)
    # chi-squared with 16 degrees of freedom: mean 16, variance 32; 8000 draws.
    assert squares.mean().item() == pytest.approx(16, abs=0.3)
    assert squares.var().item() == pytest.approx(32, rel=0.1)


def test_rotations_are_uniform() -> None:
    """Each entry of the first direction is as often positive as negative."""
    drawn = orthogonal_features(4 * 2000, 4, seed=0).reshape(2000, 4, 4)
    share = (drawn > 0).double().mean(0)
    assert (share - 0.5).abs().max() < 0.06  # five standard deviations


def test_the_draw_is_fixed_by_the_seed_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (PerformerKernel(2, 8, seed=s).projection for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_default_number_of_features_is_recorded() -> None:
    kernel = PerformerKernel(2, 64)
    assert kernel.options == {"features": 266, "seed": 0}  # 64·ln 64 = 266.2
    assert kernel.projection.shape == (266, 64)
    assert PerformerKernel(2, 1).features == 1
    assert [name for name, _ in kernel.named_buffers()] == ["projection"]


def test_no_features_are_refused() -> None:
    with pytest.raises(UsageError, match="`features` is 0: set it to a whole number, 1 to 16384"):
        PerformerKernel(2, 8, features=0)


def far_apart(sign: float) -> list[Tensor]:
    """Keys 30 times longer than the queries, all of them with (or against) the queries: logits of ±150."""
    query = torch.ones(1, 2, 100, 8) + 0.1 * torch.randn(1, 2, 100, 8)
    key = sign * 30 * (torch.ones(1, 2, 100, 8) + 0.1 * torch.randn(1, 2, 100, 8))
    return [query, key, torch.randn(1, 2, 100, 8)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_exponents_out_of_range_are_no_hole_in_the_output(sign: float, causal: bool) -> None:
    """The features of query and key underflow where the other's do not; the weights must still sum to one."""
    query, key, _ = far_apart(sign)
    ones = torch.ones(1, 2, 100, 8)
    torch.testing.assert_close(attend(PerformerKernel(2, 8), query, key, ones, scale=8**-0.5, causal=causal), ones)


def test_a_large_key_in_the_future_does_not_drown_the_past() -> None:
    """The running maximum: relative to that of all keys, the first 64 would underflow to nothing."""
    query, key, value = (torch.randn(1, 2, 150, 8, dtype=torch.float32) for _ in range(3))
    key[:, :, :100] *= 12
    kernel = PerformerKernel(2, 8)
    out = attend(kernel, query, key, value, scale=0.35, causal=True)
    exact = attend(kernel, *(t.double() for t in (query, key, value)), scale=0.35, causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    assert (out[:, :, :64].abs().amax(-1) > 0).all()
