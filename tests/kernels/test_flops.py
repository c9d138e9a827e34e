"""Costs of exact attention and latte against the paper's printed figures and PyTorch's own counter."""

from __future__ import annotations

import pytest
import torch
from reference import softmax_reference
from torch.utils.flop_counter import FlopCounterMode

from latte_convert.attention import CallShape
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.latte.kernel import LatteKernel

SHAPES = [(100, 100), (130, 70), (50, 150)]


def test_the_papers_figures() -> None:
    """16 layers of N = 1000, D = 1024, H = 16: 16.384 against 1.082 GFLOPs."""
    shape = CallShape(queries=1000, keys=1000, heads=16, head_dim=64, value_dim=64)
    assert 16 * ExactKernel(16, 64).paper_flops(shape) / 1e9 == pytest.approx(16.384, abs=5e-4)
    assert 16 * LatteKernel(16, 64).paper_flops(shape) / 1e9 == pytest.approx(1.082, abs=5e-4)


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_exact_is_what_the_reference_computes(queries: int, keys: int) -> None:
    query, key, value = torch.randn(1, 3, queries, 8), torch.randn(1, 3, keys, 8), torch.randn(1, 3, keys, 6)
    with FlopCounterMode(display=False) as counter:
        softmax_reference(query, key, value, scale=0.3)
    assert ExactKernel(3, 8).flops(CallShape(queries, keys, 3, 8, 6)) == counter.get_total_flops()


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_latte_is_the_four_products_of_its_formula(queries: int, keys: int) -> None:
    phi_q, phi_k, value = torch.rand(3, queries, 8), torch.rand(3, keys, 8), torch.rand(3, keys, 6)
    ones = torch.ones(3, keys, 1)
    with FlopCounterMode(display=False) as counter:
        phi_q @ (phi_k.mT @ value)
        phi_q @ (phi_k.mT @ ones)
    assert LatteKernel(3, 8).flops(CallShape(queries, keys, 3, 8, 6)) == counter.get_total_flops()


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_causal_exact_counts_the_visible_pairs(queries: int, keys: int) -> None:
    pairs = sum(1 for i in range(queries) for j in range(keys) if j <= i + keys - queries)
    assert ExactKernel(2, 4).flops(CallShape(queries, keys, 2, 4, 4, causal=True)) == pairs * 2 * (4 + 4) * 2
