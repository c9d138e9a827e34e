"""The fixed-centre baseline; its parity with the specification is in test_linear.py."""

from __future__ import annotations

import pytest
import torch
from comparing import attend

from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.kernels.rivals.qt_vit import QtVitKernel
from latte_convert.kernels.softmax import softmax_attention


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_latte_before_any_fit_with_both_switches_off(causal: bool) -> None:
    inputs = [torch.randn(2, 3, 70, 8) for _ in range(3)]
    plain, latte = QtVitKernel(3, 8), LatteKernel(3, 8, tte=False, jpn=False)
    assert torch.equal(
        attend(plain, *inputs, scale=0.3, causal=causal), attend(latte, *inputs, scale=0.3, causal=causal)
    )
    assert not list(plain.parameters())


def test_one_channel_is_the_whole_expansion() -> None:
    """With d = 1 nothing but a channel's product with itself exists, except that ``1·1`` is ``(q + 1)(k + 1)``'s."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [2.0]]]])
    value = torch.tensor([[[[1.0], [5.0]]]])
    # (1 + 1)²·(0 + 1)² + 1 = 5 and (1 + 1)²·(2 + 1)² + 1 = 37.
    assert attend(QtVitKernel(1, 1), query, key, value, scale=1.0).item() == pytest.approx((5 * 1 + 37 * 5) / 42)


def test_constant_values_come_out_as_they_are() -> None:
    """As with softmax, the weights of a query sum to one."""
    query, key = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 20, 8)
    value = torch.full((2, 3, 20, 8), 2.5)
    torch.testing.assert_close(
        attend(QtVitKernel(3, 8), query, key, value, scale=0.3), attend(softmax_attention, query, key, value, scale=0.3)
    )
