"""The memory meter on allocations of known size."""

from __future__ import annotations

import pytest
import torch

from latte_convert.bench.memory import peak_memory

CPU = torch.device("cpu")
KIB = 256  # float32 elements


def test_what_is_freed_before_the_peak_does_not_count():
    def call():
        first = torch.zeros(KIB)
        second = torch.zeros(2 * KIB)
        del first
        third = torch.zeros(3 * KIB)
        return second, third

    assert peak_memory(call, CPU) == 5 * 1024


def test_inputs_their_views_and_changes_in_place_do_not_count():
    weight = torch.zeros(64, 64)
    assert peak_memory(lambda: weight.t()[1:].add_(1).mul_(2), CPU) == 0


def test_views_of_a_new_tensor_count_once():
    assert peak_memory(lambda: torch.zeros(4, KIB).t()[:10].unsqueeze(0), CPU) == 4 * 1024


def test_the_same_call_twice_measures_the_same():
    tokens = torch.randn(1, 2, 32, 8)

    def call():
        return torch.softmax(tokens @ tokens.mT, -1) @ tokens

    first = peak_memory(call, CPU)
    assert peak_memory(call, CPU) == first
    # Logits and weights, 2 heads of 32 x 32, at once; then weights and output.
    assert first == 2 * 2 * 32 * 32 * 4


def test_an_error_passes_through():
    def call():
        torch.zeros(KIB)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        peak_memory(call, CPU)
    assert peak_memory(lambda: torch.zeros(KIB), CPU) == 1024
