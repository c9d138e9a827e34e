"""The exact kernel and the softmax reference, against softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
from comparing import attend
from reference import softmax_reference

from latte_convert.attention import AttentionCall
from latte_convert.kernels.exact import ExactKernel


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9)])
def test_a_bias_is_added_to_the_logits(queries: int, keys: int, causal: bool, masked: bool) -> None:
    query, key, value = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 5)
    bias = torch.randn(1, 3, queries, keys)
    mask = torch.arange(keys).expand(2, -1) != 2 if masked else None
    out = ExactKernel(3, 8, value_dim=5)(AttentionCall(query, key, value, 0.4, mask, causal, bias=bias))
    logits = 0.4 * query @ key.mT + bias
    if masked:
        logits[..., 2] = float("-inf")
    if causal:
        logits = logits.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), float("-inf"))
    torch.testing.assert_close(out, logits.softmax(-1) @ value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4)])
def test_equals_softmax_one_row_at_a_time(queries: int, keys: int, causal: bool, masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 5)
    mask = torch.stack([torch.zeros(keys, dtype=torch.bool), torch.arange(keys) != 2]) if masked else None
    out = attend(ExactKernel(3, 8), query, key, value, scale=0.4, mask=mask, causal=causal)
    spec = softmax_reference(query, key, value, scale=0.4, mask=mask, causal=causal)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(queries)).tolist():
        last = i + keys - queries if causal else keys - 1
        seen = [j for j in range(last + 1) if mask is None or mask[b, j]]
        expected = torch.zeros(5)
        if seen:
            weights = [math.exp(0.4 * float(query[b, h, i] @ key[b, h, j])) for j in seen]
            rows = [w / sum(weights) * value[b, h, j] for w, j in zip(weights, seen, strict=True)]
            expected = torch.stack(rows).sum(0)
        torch.testing.assert_close(out[b, h, i], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(spec[b, h, i], expected, rtol=1e-5, atol=1e-5)
