"""Linear Transformer's kernel; its parity with the specification is in test_linear.py."""

from __future__ import annotations

import math

import pytest
import torch
from comparing import attend

from latte_convert.kernels.rivals.elu import EluKernel


def test_two_keys_by_hand() -> None:
    """phi(1) = 2, phi(0) = 1, phi(-1) = 1/e: weights 2 and 2/e."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [-1.0]]]])
    value = torch.tensor([[[[1.0], [3.0]]]])
    expected = (2 * 1 + 2 / math.e * 3) / (2 + 2 / math.e)
    assert attend(EluKernel(1, 1), query, key, value, scale=1.0).item() == pytest.approx(expected)


def test_the_scaling_of_logits_is_not_part_of_it() -> None:
    inputs = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    kernel = EluKernel(2, 4)
    assert torch.equal(attend(kernel, *inputs, scale=0.1), attend(kernel, *inputs, scale=1.0))
