"""The exact second-order kernel; its parity with the closed form is in test_linear.py."""

from __future__ import annotations

import pytest
import torch
from comparing import attend
from torch import Tensor

from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.kernels.rivals.taylor2 import Taylor2Kernel
from latte_convert.kernels.softmax import softmax_attention


def with_alpha(kernel: Taylor2Kernel, *alpha: float) -> Taylor2Kernel:
    with torch.no_grad():
        kernel.alpha.copy_(torch.tensor(alpha))
    return kernel


def logits_of_size(size: float, offset: float = 0.0) -> list[Tensor]:
    """Query, key and value, float64, with ``|q·k - offset| <= size``."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    query, key = query / query.norm(dim=-1, keepdim=True), key / key.norm(dim=-1, keepdim=True)
    query[..., 0], key[..., 0] = 1.0, offset
    query[..., 1:] *= size
    return [query, key, value]


def error(kernel: Taylor2Kernel, inputs: list[Tensor]) -> float:
    return (attend(kernel, *inputs, scale=1.0) - attend(softmax_attention, *inputs, scale=1.0)).abs().max().item()


def test_the_error_is_of_third_order() -> None:
    kernel = Taylor2Kernel(2, 8)
    coarse, fine = error(kernel, logits_of_size(0.2)), error(kernel, logits_of_size(0.1))
    assert 6 < coarse / fine < 10  # 2³


def test_the_anchor_moves_the_expansion() -> None:
    """Logits around -2 are expanded well around -2, and badly around 0."""
    inputs = logits_of_size(0.2, offset=-2.0)
    at_zero, at_anchor = (error(with_alpha(Taylor2Kernel(2, 8), a), inputs) for a in (0.0, -2.0))
    assert at_anchor < 0.05 * at_zero


def test_one_anchor_per_head() -> None:
    inputs = [torch.randn(2, 2, 150, 8) for _ in range(3)]
    both = attend(with_alpha(Taylor2Kernel(2, 8, granularity="head"), -0.5, 0.9), *inputs, scale=0.3)
    for head, alpha in enumerate((-0.5, 0.9)):
        alone = attend(with_alpha(Taylor2Kernel(2, 8), alpha), *inputs, scale=0.3)
        torch.testing.assert_close(both[:, head], alone[:, head])


def test_one_channel_is_latte_with_a_mixed_term() -> None:
    """Two keys by hand: x = 0 and 2, so (0 + 1)² + 1 = 2 and (2 + 1)² + 1 = 10; LATTE's diagonal gives 5 and 37."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [2.0]]]])
    value = torch.tensor([[[[1.0], [5.0]]]])
    assert attend(Taylor2Kernel(1, 1), query, key, value, scale=1.0).item() == pytest.approx((2 * 1 + 10 * 5) / 12)
    latte = attend(LatteKernel(1, 1, tte=False, jpn=False), query, key, value, scale=1.0)
    assert latte.item() == pytest.approx((5 * 1 + 37 * 5) / 42)


def test_the_gradient_is_finite_at_the_largest_anchor() -> None:
    kernel = with_alpha(Taylor2Kernel(2, 8), 1.0)
    attend(kernel, *(torch.randn(1, 2, 9, 8) for _ in range(3)), scale=0.3).square().sum().backward()
    assert kernel.alpha.grad is not None
    assert kernel.alpha.grad.isfinite().all()


def test_the_scalar_is_the_anchor() -> None:
    assert with_alpha(Taylor2Kernel(2, 8), -0.5).scalars()["alpha"].tolist() == [-0.5]
