from __future__ import annotations

import math

import pytest
import torch

from latte_convert.measuring.agreement import Agreement


def test_streamed_sums_equal_the_definitions():
    torch.manual_seed(0)
    pairs = [(torch.randn(2, n, 5), torch.randn(2, n, 5)) for n in (3, 7)]
    agreement = Agreement()
    for a, b in pairs:
        agreement.add(a, b)
    a = torch.cat([x.reshape(-1, 5) for x, _ in pairs])
    b = torch.cat([y.reshape(-1, 5) for _, y in pairs])
    cosines = [(x @ y / (x.norm() * y.norm())).item() for x, y in zip(a, b, strict=True)]
    assert agreement.cosine == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)
    assert agreement.mse == pytest.approx(((a - b) ** 2).mean().item(), rel=1e-6)
    assert agreement.relative_error == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-6)
    assert agreement.top1 == pytest.approx(
        sum(int(x.argmax() == y.argmax()) for x, y in zip(a, b, strict=True)) / len(a)
    )


def test_equal_tensors_are_perfect_even_where_zero():
    agreement = Agreement()
    agreement.add(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]]))
    assert agreement.cosine == pytest.approx(1.0)
    assert agreement.relative_error == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_cosine_of_equal_tensors_is_one_to_the_bit(dtype):
    a = torch.randn(64, 385, generator=torch.Generator().manual_seed(0)).to(dtype)
    agreement = Agreement()
    agreement.add(a, a.clone())
    agreement.add(a, a.T.contiguous().T)  # another layout
    assert agreement.cosine == 1.0


def test_nan_is_not_hidden_and_cosines_end_at_one():
    agreement = Agreement()
    agreement.add(torch.randn(1000, 7), torch.randn(1000, 1).abs() * torch.ones(1000, 7))
    assert agreement.cosine <= 1
    agreement.add(torch.full((1, 2), math.nan), torch.ones(1, 2))
    assert math.isnan(agreement.cosine)


def test_known_values():
    agreement = Agreement()
    agreement.add(torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]]))
    assert agreement.cosine == pytest.approx(24 / 25)
    assert agreement.mse == pytest.approx(1.0)
    assert agreement.relative_error == pytest.approx(math.sqrt(2) / 5)


def test_zero_against_something_is_infinitely_wrong():
    agreement = Agreement()
    agreement.add(torch.zeros(1, 2), torch.ones(1, 2))
    assert agreement.relative_error == math.inf


def test_half_precision_does_not_overflow():
    big = torch.full((1, 4), 300.0, dtype=torch.float16)
    agreement = Agreement()
    agreement.add(big, big)
    assert agreement.cosine == pytest.approx(1.0)
    assert agreement.squared_norm == pytest.approx(4 * 300.0**2)
