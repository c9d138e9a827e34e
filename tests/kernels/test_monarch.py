"""MonarchAttention against its variational definition, softmax, and arithmetic by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparing import DIM, HEADS, TOLERANCE, LargestTensor, assert_close, assert_grads_close, attend, tokens
from reference.monarch import monarch_reference
from reference.softmax import softmax_reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from latte_convert.attention import CallShape, TokenLayout
from latte_convert.errors import UsageError
from latte_convert.kernels.rivals.monarch import MonarchKernel

# Queries, keys, block: one block, full blocks, padding, blocks of one, queries behind an exact prefix.
SHAPES = [(1, 1, 1), (9, 9, 9), (24, 24, 6), (29, 29, 5), (7, 7, 1), (26, 29, 6), (20, 29, 5)]


def some_mask(keys: int) -> Tensor:
    """Random keys for the second sample, both ends among them and a long run unseen; none at all for the first."""
    seen = torch.rand(keys) > 0.3
    seen[keys // 4 : 3 * keys // 4] = False
    seen[0] = seen[-1] = True
    return torch.stack([torch.zeros(keys, dtype=torch.bool), seen])


def monarch(*qkv: Tensor, block: int, steps: int = 1, **call: Any) -> Tensor:
    return attend(MonarchKernel(HEADS, DIM, block=block, steps=steps), *qkv, **call)


# --- parity with the specification ---


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_reference(
    shape: tuple[int, int, int], masked: bool, dtype: torch.dtype
) -> None:
    queries, keys, block = shape
    for steps in (1, 2, 3):
        torch.manual_seed(1)
        inputs = [t.requires_grad_() for t in tokens(queries, keys, dtype=dtype)]
        mask = some_mask(keys) if masked else None
        call = {"scale": 0.5, "block": block, "steps": steps, "mask": mask}
        actual, expected = monarch(*inputs, **call), monarch_reference(*inputs, **call)
        assert_close(actual, expected, TOLERANCE[dtype])
        assert_grads_close(actual, expected, inputs, TOLERANCE[dtype])


def test_two_blocks_of_two_by_hand() -> None:
    """The mean query of the second block is 0, so it sees both keys alike: lse = ln 2 and mean key = ln(3)/2.

    For the first query, 1, the block's mass is e^(ln 2 + ln(3)/2) = 2·sqrt(3); its own block has 1 + 3 = 4.
    """
    query = torch.tensor([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 4, 1)
    key = torch.tensor([0.0, math.log(3), 0.0, math.log(3)]).reshape(1, 1, 4, 1)
    matrix = monarch(query, key, torch.eye(4)[None, None], scale=1.0, block=2)[0, 0]
    share = 4 / (4 + 2 * math.sqrt(3))
    expected = [share / 4, 3 * share / 4, (1 - share) / 2, (1 - share) / 2]
    assert matrix[0].tolist() == pytest.approx(expected)
    assert matrix[1].tolist() == pytest.approx([0.25] * 4)


# --- laws ---


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [23, 20])
@pytest.mark.parametrize("block", [1, 23, 40])
def test_one_block_or_blocks_of_one_token_are_softmax(block: int, queries: int, masked: bool) -> None:
    inputs, mask = tokens(queries, 23), some_mask(23) if masked else None
    exact = softmax_reference(*inputs, scale=0.5, mask=mask)
    assert_close(monarch(*inputs, scale=0.5, block=block, mask=mask), exact, 1e-5)
    kernel = MonarchKernel(HEADS, DIM, block=block)
    assert_close(attend(kernel, *inputs, scale=0.5, mask=mask), exact, 1e-5)


def test_equal_queries_give_softmax() -> None:
    """Every mean query is the query itself, and a tangent is exact where it touches."""
    query, key, value = tokens(29, 29)
    query = query[:, :, :1].expand(-1, -1, 29, -1)
    out = monarch(query, key, value, scale=0.5, block=6)
    # Padded queries are zeros: 29 tokens in blocks of 6 leave one, at position 0 of the first block.
    exact = softmax_reference(query, key, value, scale=0.5)
    assert_close(out[:, :, torch.arange(29) % 6 != 5], exact[:, :, torch.arange(29) % 6 != 5], 1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_rows_sum_to_one_and_unseen_keys_weigh_nothing(steps: int) -> None:
    query, key, _ = tokens(29, 29)
    mask = some_mask(29)
    identity = torch.eye(29).expand(2, HEADS, -1, -1)
    matrix = monarch(query, key, identity, scale=0.5, block=5, steps=steps, mask=mask)
    assert_close(matrix[1].sum(-1), torch.ones(HEADS, 29), 1e-5)
    assert not matrix[1, :, :, ~mask[1]].any()
    assert not matrix[0].any()


def test_every_step_raises_the_objective_towards_that_of_softmax() -> None:
    """``<A, S> + entropy(A)`` is at most the sum of the rows' log-sum-exps, and softmax reaches it."""
    query, key, _ = tokens(24, 24, dtype=torch.float64)
    logits, identity = 2 * query @ key.mT, torch.eye(24, dtype=torch.float64).expand(2, HEADS, -1, -1)
    reached = []
    for steps in (1, 2, 3, 6):
        matrix = monarch(query, key, identity, scale=2.0, block=4, steps=steps)
        reached.append((matrix * logits).sum() - torch.special.xlogy(matrix, matrix).sum())
    objective = torch.stack([*reached, logits.logsumexp(-1).sum()])
    assert (objective.diff() > 0).all()


# --- numerics ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2])
def test_large_logits_stay_finite(steps: int, dtype: torch.dtype) -> None:
    inputs = [t.to(dtype).requires_grad_() for t in (200 * t for t in tokens(67, 67))]
    out = monarch(*inputs, scale=1.0, block=8, steps=steps, mask=some_mask(67))
    assert not out[0].any()
    # Weights are positive and sum to one: every channel stays between its smallest and its largest value.
    low, high = (bound[1] for bound in torch.aminmax(inputs[2].detach(), dim=2, keepdim=True))
    assert (out[1] >= low - 1).all()
    assert (out[1] <= high + 1).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), inputs))


@pytest.mark.parametrize("masked", [False, True])
def test_memory_follows_the_root_of_the_tokens(masked: bool) -> None:
    count = 4096
    inputs = [torch.randn(1, 1, count, 16) for _ in range(3)]
    mask = torch.rand(1, count) > 0.2 if masked else None
    with torch.no_grad(), LargestTensor() as largest:
        attend(MonarchKernel(1, 16, steps=2), *inputs, scale=0.25, mask=mask)
    assert largest.numel == count * 64  # one factor: 64 blocks of 64 by 64


# --- the module ---


LAYOUTS = [
    (TokenLayout(prefix=1, grid=(6, 5)), 31),
    (TokenLayout(prefix=3, grid=(5, 7)), 38),
    (TokenLayout(prefix=1, grid=(30, 1)), 31),
    (None, 31),
]


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
@pytest.mark.parametrize(("block", "steps", "extras"), [
    (None, 1, {}), (None, 3, {}), (4, 2, {"exact_prefix": True}), (100, 1, {"output_map": True}),
])  # fmt: skip
def test_flops_equal_what_torch_counts(
    layout: TokenLayout | None, count: int, block: int | None, steps: int, extras: dict[str, bool]
) -> None:
    kernel = MonarchKernel(HEADS, DIM, block=block, steps=steps, **extras)
    inputs = [torch.randn(1, HEADS, count, DIM) for _ in range(3)]
    # The counter knows nothing of the CPU's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        attend(kernel, *inputs, scale=0.5, layout=layout)
    shape = CallShape(count, count, HEADS, DIM, DIM, layout=layout or TokenLayout())
    assert kernel.flops(shape) == counter.get_total_flops()


def test_flops_grow_with_the_root_of_the_tokens() -> None:
    def flops(count: int) -> int:
        return MonarchKernel(1, 8).flops(CallShape(count, count, 1, 8, 8))

    # 2·(block² · blocks) entries of each factor, times 2 (right) + 1 (left) for logits and mean keys, + 2 for values.
    assert flops(16**2) == 2 * 16**3 * 8 * 5
    assert flops(64**2) == 2 * 64**3 * 8 * 5


@pytest.mark.parametrize(("layout", "keys", "block"), [
    (None, 1370, 37), (TokenLayout(prefix=1, grid=(37, 37)), 1370, 37), (TokenLayout(prefix=1, grid=(14, 14)), 197, 14),
    (TokenLayout(grid=(20, 12)), 240, 12), (TokenLayout(grid=(240, 1)), 240, 15), (TokenLayout(grid=(1, 240)), 240, 15),
    (None, 1, 1),
])  # fmt: skip
def test_without_a_block_it_is_a_row_of_the_grid_or_the_root(layout: TokenLayout | None, keys: int, block: int) -> None:
    inputs = tokens(keys, keys, batch=1)
    out = attend(MonarchKernel(HEADS, DIM), *inputs, scale=0.5, layout=layout)
    assert torch.equal(out, monarch(*inputs, scale=0.5, block=block))


def test_queries_behind_an_exact_prefix_keep_their_places() -> None:
    """With the prefix in a block of its own, only its rows differ from a call without ``exact_prefix``."""
    layout, inputs = TokenLayout(prefix=2, grid=(5, 6)), [torch.randn(2, HEADS, 32, DIM) for _ in range(3)]
    exact = attend(MonarchKernel(HEADS, DIM, exact_prefix=True), *inputs, scale=0.5, layout=layout)
    plain = attend(MonarchKernel(HEADS, DIM), *inputs, scale=0.5, layout=layout)
    assert_close(exact[:, :, :2], softmax_reference(*inputs, scale=0.5)[:, :, :2], 1e-5)
    # Positions 4 and 5 of a row are those of the prefix in its block, and share its mean queries.
    same = torch.arange(30) % 6 < 4
    assert_close(exact[:, :, 2:][:, :, same], plain[:, :, 2:][:, :, same], 1e-6)
    assert not torch.allclose(exact[:, :, 2:][:, :, ~same], plain[:, :, 2:][:, :, ~same])


@pytest.mark.parametrize("options", [{"block": 0}, {"steps": 0}])
def test_blocks_and_steps_are_at_least_one(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"`(block|steps)` is .*: set it to a whole number"):
        MonarchKernel(HEADS, DIM, **options)


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="12 queries and 9 keys"):
        monarch(*tokens(12, 9), scale=0.5, block=3)
