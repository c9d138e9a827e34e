"""What of a mask a linear kernel can honour, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte_convert.adapters.masks import key_mask, shared_by_queries

PADDING = torch.tensor([[True, True, True, True], [True, True, False, False]])
TRIANGLE = torch.tensor([[j <= i for j in range(4)] for i in range(4)])


def _additive(allowed: Tensor, low: float = torch.finfo(torch.float32).min) -> Tensor:
    return torch.where(allowed, 0.0, low)


EXPANDED = PADDING[:, None, None, :].expand(2, 1, 4, 4)
ROWS = EXPANDED.contiguous()


@pytest.mark.parametrize(
    "mask",
    [
        PADDING,
        PADDING.long(),
        PADDING.float(),
        PADDING[:, None, None, :],
        EXPANDED,
        ROWS,
        EXPANDED.expand(2, 3, 4, 4),
        _additive(EXPANDED),
        _additive(ROWS),
        _additive(ROWS, float("-inf")),
        _additive(ROWS, -10000.0),
        _additive(ROWS).half(),
        2 * _additive(ROWS),
    ],
    ids=[
        "2d",
        "2d_int",
        "2d_float",
        "one_row",
        "expanded",
        "rows",
        "heads",
        "additive",
        "additive_rows",
        "inf",
        "minus_1e4",
        "half",
        "sum",
    ],
)
def test_key_padding(mask: Tensor) -> None:
    found = key_mask(mask, queries=4, keys=4, causal=False)
    assert found.dtype == torch.bool
    assert found.tolist() == PADDING.tolist()


@pytest.mark.parametrize("additive", [False, True])
def test_causal_with_right_padding(additive: bool) -> None:
    mask = TRIANGLE & PADDING[:, None, None, :]
    found = key_mask(_additive(mask) if additive else mask, queries=4, keys=4, causal=True)
    assert found.tolist() == PADDING.tolist()


def test_causal_with_left_padding() -> None:
    """The first rows of the padded sequence see nothing; nobody reads them."""
    padding = PADDING.flip(1)
    mask = TRIANGLE & padding[:, None, None, :]
    assert not mask[1, 0, 0].any()
    found = key_mask(mask, queries=4, keys=4, causal=True)
    assert found.tolist() == padding.tolist()


def test_causal_with_cached_keys() -> None:
    mask = TRIANGLE[2:][None, None]  # queries 2 and 3 of four keys
    found = key_mask(mask, queries=2, keys=4, causal=True)
    assert found.tolist() == [[True] * 4]


def test_one_query_of_a_causal_site_sees_what_is_not_padding() -> None:
    found = key_mask(PADDING[:, None, None, :], queries=1, keys=4, causal=True)
    assert found.tolist() == PADDING.tolist()


def test_padded_queries_may_have_empty_rows() -> None:
    """Some libraries write the outer product of the padding with itself."""
    found = key_mask((PADDING[:, :, None] & PADDING[:, None, :])[:, None], queries=4, keys=4, causal=False)
    assert found.tolist() == PADDING.tolist()


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(1, 1, 1, 4, dtype=torch.bool).expand(1, 1, 4, 4), torch.zeros(1, 1, 4, 4, dtype=torch.bool)],
)
def test_a_sequence_of_nothing_but_padding(mask: Tensor) -> None:
    found = key_mask(mask, queries=4, keys=4, causal=False)
    assert found.tolist() == [[False] * 4]


def test_keys_beyond_those_present_are_dropped() -> None:
    """Masks of static caches are as long as the cache."""
    found = key_mask(EXPANDED, queries=4, keys=3, causal=False)
    assert found.tolist() == PADDING[:, :3].tolist()


WINDOW = torch.tensor([[abs(i - j) <= 1 for j in range(4)] for i in range(4)])
PACKED = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool()


@pytest.mark.parametrize(
    ("mask", "causal", "message"),
    [
        (WINDOW[None, None], False, "not key padding .a window, or packed sequences"),
        ((WINDOW & TRIANGLE)[None, None], True, "not causal key padding .a window, or packed sequences"),
        (PACKED[None, None], False, "not key padding"),
        ((PACKED & TRIANGLE)[None, None], True, "not causal key padding"),
        (TRIANGLE[None, None], False, "not key padding"),
        (ROWS, True, "not causal key padding"),
        (_additive(WINDOW)[None, None], False, "not key padding"),
        (torch.stack([TRIANGLE, TRIANGLE | True])[None], True, "not causal key padding"),  # differs by head
        (torch.randn(1, 2, 4, 4), False, "carries a bias"),
        (torch.full((1, 1, 1, 4), -3.0).expand(1, 1, 4, 4), False, "carries a bias"),
        (torch.ones(1, 1, 4, 4), False, "carries a bias"),  # 1 = attend, as floats: a bias of 1 to a library
        (torch.ones(1, 1, 4, 4, dtype=torch.long), False, "torch.int64 is neither boolean nor additive"),
        (torch.ones(2, 4, 4, dtype=torch.bool), False, r"shape \(2, 4, 4\)"),
        (torch.ones(2, 3, dtype=torch.bool), False, r"shape \(2, 3\) is not key padding for 4 keys"),
    ],
)
def test_anything_else_is_refused(mask: Tensor, causal: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        key_mask(mask, queries=4, keys=4, causal=causal)


@pytest.mark.parametrize("additive", [False, True])
def test_an_expanded_mask_is_read_through_one_row(additive: bool) -> None:
    """A million by a million: anything but one row would not fit in memory."""
    keys = 1_000_000
    row = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    row[..., -5:] = False
    mask = (_additive(row) if additive else row).expand(1, 8, keys, keys)
    assert shared_by_queries(mask)
    found = key_mask(mask, queries=keys, keys=keys, causal=False)
    assert torch.equal(found, row[0, 0])


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    left=st.booleans(),
    causal=st.booleans(),
    additive=st.booleans(),
)
def test_whatever_the_padding_it_comes_back(lengths: list[int], left: bool, causal: bool, additive: bool) -> None:
    size = 6
    padding = torch.tensor([[(size - 1 - j if left else j) < length for j in range(size)] for length in lengths])
    mask = padding[:, None, None, :].expand(-1, 1, size, size)
    if causal:
        mask = mask & torch.ones(size, size, dtype=torch.bool).tril()
    found = key_mask(_additive(mask) if additive else mask, queries=size, keys=size, causal=causal)
    assert found.tolist() == padding.tolist()
