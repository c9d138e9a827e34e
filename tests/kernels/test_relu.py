"""EfficientViT's kernel; its parity with the specification is in test_linear.py."""

from __future__ import annotations

import pytest
import torch
from comparing import attend
from torch import Tensor

from latte_convert.kernels.rivals.relu import ReluKernel


def one_channel(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).reshape(1, 1, -1, 1)


def test_negative_channels_do_not_count() -> None:
    """Weights 2·3, 2·1 and 0."""
    out = attend(ReluKernel(1, 1), one_channel(2), one_channel(3, 1, -4), one_channel(1, 5, 100), scale=1.0)
    assert out.item() == pytest.approx((6 * 1 + 2 * 5) / 8)


@pytest.mark.parametrize("causal", [False, True])
def test_a_query_without_a_positive_channel_gets_zero_and_a_finite_gradient(causal: bool) -> None:
    query = one_channel(-2, 1).requires_grad_()
    key, value = one_channel(3, 1).requires_grad_(), one_channel(1, 5).requires_grad_()
    out = attend(ReluKernel(1, 1), query, key, value, scale=1.0, causal=causal)
    assert out.flatten().tolist() == pytest.approx([0, 2])
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [query, key, value]))


def test_the_scaling_of_queries_and_keys_cancels() -> None:
    query, key, value = (torch.randn(1, 2, 9, 4) for _ in range(3))
    kernel = ReluKernel(2, 4)
    torch.testing.assert_close(
        attend(kernel, 0.3 * query, 5 * key, value, scale=1.0), attend(kernel, query, key, value, scale=1.0)
    )


def test_the_published_constant_is_in_the_divisor() -> None:
    """Weight 1e-8·1e-8 = 1e-16, divisor 1e-16 + 1e-15."""
    out = attend(ReluKernel(1, 1), one_channel(1e-8), one_channel(1e-8), one_channel(22), scale=1.0)
    assert out.item() == pytest.approx(2, rel=1e-5)
