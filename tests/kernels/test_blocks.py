"""blocks against its definition, its limits, and what its pieces promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import LargestTensor
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.blocks import blocks_reference
from reference.softmax import softmax_reference
from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape, Merged, TokenLayout
from latte_convert.errors import UsageError
from latte_convert.kernels.blocks.kernel import BlocksKernel
from latte_convert.kernels.blocks.members import equal_blocks
from latte_convert.kernels.blocks.windows import Slices, along_curve, grid_places
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.flops import measured_flops

HEADS, DIM, SCALE = 2, 20, 0.4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CASES = [  # prefix, grid or length, window, region, blocks, opened
    (1, (8, 9), 6, 12, 8, 2),
    (0, (5, 14), 8, 8, 4, 0),
    (3, (10, 7), 10, 20, 16, 1),
    (0, 67, 7, 14, 8, 3),
    (2, 61, 5, 9, 1, 0),
    (1, (1, 64), 8, 16, 4, 9),
]


class Always(BlocksKernel):
    """Blocks also where softmax would cost no more."""

    def is_softmax(self, shape: CallShape) -> bool:
        return shape.keys == shape.layout.prefix


def size_of(grid: tuple[int, int] | int) -> int:
    return grid if isinstance(grid, int) else grid[0] * grid[1]


def tokens(count: int, *, value_dim: int = DIM, dtype: Any = torch.float64) -> list[Tensor]:
    """Query, key and value as views of ``(B, N, H, d)`` projections; queries have a mean, as in real models."""
    torch.manual_seed(count)
    query, key, value = (
        torch.randn(2, count, HEADS, d, dtype=torch.float64).transpose(1, 2) for d in (DIM, DIM, value_dim)
    )
    return [t.to(dtype) for t in (query + 1, key, value)]


def some_mask(count: int) -> Tensor:
    """The first sample sees no key; the second about 60 %, and those at both ends: there is no padding."""
    torch.manual_seed(count)
    mask = torch.rand(2, count) > 0.4
    mask[0], mask[1, :5], mask[1, -1] = False, True, True
    return mask


def some_merged(count: int, prefix: int) -> Merged:
    torch.manual_seed(count)
    return Merged(torch.randint(1, 9, (2, count)).float(), 30 * torch.rand(2, count - prefix, 2))


def described(case: tuple[Any, ...], masked: bool = False, merged: bool = False) -> dict[str, Any]:
    prefix, grid, *_ = case
    count = prefix + size_of(grid)
    layout = TokenLayout(prefix, None if isinstance(grid, int) else grid)
    return {
        "layout": layout,
        "mask": some_mask(count) if masked else None,
        "merged": some_merged(count, prefix) if merged else None,
    }


def expected_of(case: tuple[Any, ...], inputs: list[Tensor], call: dict[str, Any]) -> Tensor:
    """The definition, with the line and the blocks of the kernel."""
    prefix, grid, window, region, blocks, opened = case
    count = size_of(grid)
    line = torch.arange(count).expand(2, -1)
    if call["merged"] is not None:
        line = along_curve(call["merged"].places)
    elif not isinstance(grid, int):
        line = along_curve(grid_places(grid, torch.device("cpu"))).expand(2, -1)
    assign = torch.empty(2, HEADS, count, dtype=torch.long)
    for sample in range(2):
        query, key = (x[sample, :, prefix:].detach()[:, line[sample]] for x in inputs[:2])
        real = None
        if call["mask"] is not None:  # the kernel sees zeros in the place of hidden keys
            real = call["mask"][sample : sample + 1, prefix:][:, line[sample]]
            key = key.masked_fill(~real[..., None], 0)
        wide = torch.promote_types(query.dtype, torch.float32)
        members = equal_blocks(query.to(wide), key.to(wide), blocks, real)
        for head in range(HEADS):
            for block in range(blocks):
                inside = members[head, block][members[head, block] < count]
                assign[sample, head, line[sample, inside]] = block
    slices = Slices.of(count, window, region)
    size = None if call["merged"] is None else call["merged"].size
    cut = {"window": slices.size, "halo": slices.halo, "opened": opened, "prefix": prefix}
    return blocks_reference(*inputs, scale=SCALE, assign=assign, line=line, mask=call["mask"], size=size, **cut)


def attend(case: tuple[Any, ...], inputs: list[Tensor], call: dict[str, Any]) -> Tensor:
    kernel = Always(HEADS, DIM, window=case[2], region=case[3], blocks=case[4], opened=case[5])
    return kernel(AttentionCall(*inputs, scale=SCALE, **call))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- parity with the definition ---


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("masked", "merged"), [(False, False), (True, False), (False, True)])
def test_outputs_and_gradients_equal_the_reference(case: tuple[Any, ...], masked: bool, merged: bool) -> None:
    inputs = tokens(case[0] + size_of(case[1]), value_dim=DIM if case[0] else 6)
    call = described(case, masked, merged)
    with torch.no_grad():
        inferred = attend(case, inputs, call)
    inputs = [t.requires_grad_() for t in inputs]
    actual, expected = attend(case, inputs, call), expected_of(case, inputs, call)
    assert_close(inferred, expected.detach(), 1e-9)
    assert_close(actual, expected, 1e-9)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (actual, expected))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-8)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("masked", "merged"), [(False, False), (True, False), (False, True)])
def test_every_dtype_with_and_without_gradients(dtype: torch.dtype, masked: bool, merged: bool) -> None:
    case = CASES[0]
    inputs, call = tokens(73, dtype=dtype), described(case, masked, merged)
    with torch.no_grad():
        expected = expected_of(case, inputs, call)
        assert_close(attend(case, inputs, call), expected, TOLERANCE[dtype])
    inputs = [t.requires_grad_() for t in inputs]
    out = attend(case, inputs, call)
    assert_close(out.detach(), expected, TOLERANCE[dtype])
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("merged", [False, True])
def test_channels_need_not_be_next_to_each_other(merged: bool) -> None:
    case = CASES[0]
    inputs, call = tokens(73, dtype=torch.float32), described(case, merged=merged)
    with torch.inference_mode():
        expected = attend(case, inputs, call)
        for strided in range(3):
            changed = list(inputs)
            changed[strided] = inputs[strided].mT.contiguous().mT  # as a convolution gives them
            assert_close(attend(case, changed, call), expected, 1e-5)


# --- limits ---


@pytest.mark.parametrize(
    "case", [(1, (8, 8), 64, 64, 8, 2), (0, 40, 8, 200, 4, 0), (2, (6, 7), 1, 9, 64, 0), (0, 50, 7, 7, 4, 4)]
)
def test_a_region_of_all_keys_or_a_block_for_each_or_all_opened_is_softmax(case: tuple[Any, ...]) -> None:
    inputs, call = tokens(case[0] + size_of(case[1])), described(case)
    assert_close(attend(case, inputs, call), softmax_reference(*inputs, scale=SCALE), 1e-9)


def test_equal_queries_get_the_exact_answer() -> None:
    case = (1, (20, 20), 50, 80, 8, 2)
    query, key, value = tokens(401)
    inputs = [query[:, :, :1].expand(-1, -1, 401, -1), 3 * key, value]
    assert_close(attend(case, inputs, described(case)), softmax_reference(*inputs, scale=SCALE), 1e-9)


def test_a_merged_token_is_as_many_equal_tokens() -> None:
    """With a block for each key nothing is approximated but by merging, which equal keys do not suffer from."""
    inputs, prefix = tokens(50), 1
    merged = Merged(torch.randint(1, 4, (1, 50)).float().expand(2, -1), torch.rand(2, 49, 2))
    often = torch.arange(50).repeat_interleave(merged.size[0].long())
    expected = softmax_reference(inputs[0], *(x[:, :, often] for x in inputs[1:]), scale=SCALE)
    for kernel in (Always(HEADS, DIM, window=4, region=8, blocks=64), BlocksKernel(HEADS, DIM)):
        call = AttentionCall(*inputs, scale=SCALE, layout=TokenLayout(prefix), merged=merged)
        assert_close(kernel(call), expected, 1e-6)


def test_more_of_everything_is_nearer_to_softmax() -> None:
    torch.manual_seed(0)
    shape = (1, 2 * HEADS * DIM, 12, 12)
    smooth = torch.nn.functional.interpolate(torch.randn(shape), (24, 24), mode="bicubic")
    key, value = smooth.reshape(1, 2, HEADS, DIM, 576).transpose(3, 4).unbind(1)
    query = key + 0.5  # tokens look at those like themselves, most of which are near
    exact = softmax_reference(query, key, value, scale=0.3)
    errors = []
    for window, region, blocks, opened in [
        (96, 96, 1, 0),
        (96, 96, 16, 0),
        (48, 96, 16, 0),
        (16, 96, 16, 0),
        (16, 96, 64, 0),
        (16, 192, 64, 0),
        (16, 192, 64, 9),
    ]:
        kernel = Always(HEADS, DIM, window=window, region=region, blocks=blocks, opened=opened)
        out = kernel(AttentionCall(query, key, value, scale=0.3, layout=TokenLayout(grid=(24, 24))))
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


# --- numerics, cost, memory ---


def test_threads_do_not_change_the_blocks() -> None:
    inputs = tokens(901, dtype=torch.float32)
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            outs.append(attend((1, (30, 30), 50, 100, 16, 2), inputs, described((1, (30, 30)))))
    assert_close(*outs, 1e-5)  # another block would change far more


@pytest.mark.parametrize("grid", [(128, 128), None])
@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_is_larger_than_a_few_of_the_inputs(grid: tuple[int, int] | None, grad: bool) -> None:
    inputs = [torch.randn(1, 1, 16384, 32) for _ in range(3)]
    with torch.set_grad_enabled(grad), LargestTensor() as largest:
        inputs[0].requires_grad_(grad)
        BlocksKernel(1, 32)(AttentionCall(*inputs, scale=0.25, layout=TokenLayout(grid=grid)))
    assert 16384 * 32 <= largest.numel <= 4 * 16384 * 32


@pytest.mark.parametrize(("grid", "prefix"), [((40, 40), 1), ((33, 29), 4), (None, 2)])
@pytest.mark.parametrize(("window", "region", "blocks", "opened"), [(32, 64, 32, 0), (50, 50, 64, 4), (16, 100, 1, 0)])
def test_flops_are_those_that_run(
    grid: tuple[int, int] | None, prefix: int, window: int, region: int, blocks: int, opened: int
) -> None:
    count = prefix + (grid[0] * grid[1] if grid else 1000)
    inputs = [t[:1] for t in tokens(count, dtype=torch.float32)]
    layout = TokenLayout(prefix=prefix, grid=grid)
    shape = CallShape(count, count, HEADS, DIM, DIM, layout=layout)
    kernel = BlocksKernel(HEADS, DIM, window=window, region=region, blocks=blocks, opened=opened)
    for grad in (False, True):
        inputs[0].requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            counted, _ = measured_flops(lambda: kernel(AttentionCall(*inputs, scale=SCALE, layout=layout)))
        assert kernel.flops(shape) == counted
        inputs[0].requires_grad_(False)
    assert counted < softmax_flops(shape)


def test_it_never_costs_more_than_softmax() -> None:
    for count in (1, 2, 9, 65, 197, 577, 1370):
        shape = CallShape(count, count, 12, 64, 64, layout=TokenLayout(prefix=1))
        assert BlocksKernel(12, 64).flops(shape) <= softmax_flops(shape)


# --- pieces ---


@given(height=st.integers(1, 40), width=st.integers(1, 40))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_the_curve_visits_every_token_and_stays_near(height: int, width: int) -> None:
    places = grid_places((height, width), torch.device("cpu"))
    order = along_curve(places)[0]
    assert torch.equal(order.sort().values, torch.arange(height * width))
    steps = (places[0, order[1:]] - places[0, order[:-1]]).abs().sum(1)
    assert (steps <= 4).all()


def test_the_curve_of_places_that_are_all_the_same() -> None:
    assert torch.equal(along_curve(torch.ones(2, 5, 2)), torch.arange(5).expand(2, -1))


def test_the_curve_does_not_depend_on_the_unit_or_on_other_samples() -> None:
    torch.manual_seed(0)
    places = torch.rand(2, 60, 2)
    assert torch.equal(along_curve(places), along_curve(8 * places + 16))
    assert torch.equal(along_curve(places[1:]), along_curve(places)[1:])


@given(count=st.integers(1, 80), window=st.integers(1, 90), region=st.integers(1, 90))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_slices_cover_the_line_and_regions_their_windows(count: int, window: int, region: int) -> None:
    slices = Slices.of(count, window, region)
    token, real = slices.places(torch.device("cpu"))
    assert len(token) == slices.padded + 2 * slices.halo
    rows = torch.where(real, token, -1)[None]
    own, around = slices.windows(rows)[0], slices.regions(rows)[0]
    assert own.shape == (slices.number, slices.size)
    assert around.shape == (slices.number, slices.region)
    assert torch.equal(own[own >= 0], torch.arange(count))
    for first, (mine, near) in enumerate(zip(own.tolist(), around.tolist(), strict=True)):
        at = first * slices.size
        assert any(token >= 0 for token in mine)
        inside = range(max(at - slices.halo, 0), min(at + slices.size + slices.halo, count))
        assert [token for token in near if token >= 0] == list(inside)
        assert set(slices.regions(token[None])[0, first].tolist()) == set(inside)


@pytest.mark.parametrize("count", [1, 2, 16])
def test_blocks_are_equal_and_hold_every_key_once(count: int) -> None:
    query, key, _ = tokens(53)
    real = torch.rand(1, 53) > 0.3
    for seen in (None, real):
        members = equal_blocks(query[0], key[0], count, seen)
        assert members.shape == (HEADS, count, -(-53 // count))
        inside = members.flatten(1).sort().values
        assert torch.equal(inside, torch.arange(inside.shape[1]).expand(HEADS, -1))


def test_blocks_are_of_keys_that_are_alike() -> None:
    torch.manual_seed(0)
    centres, query = 9 * torch.randn(8, DIM), torch.randn(1, 400, DIM)
    group = torch.arange(8).repeat_interleave(50)[torch.randperm(400)]
    key = (centres[group] + 0.1 * torch.randn(400, DIM))[None]
    members = equal_blocks(query, key, 8)[0]
    pure = sum(len(set(group[inside].tolist())) == 1 for inside in members)
    assert pure >= 6  # a median may cut through a group


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"region": -1}, {"blocks": 0}, {"blocks": 24}, {"opened": -1}, {"window": 2.5}]
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(UsageError, match=f"`{name}` is {value}"):
        BlocksKernel(HEADS, DIM, **options)


@pytest.mark.slow
def test_compiled_it_gives_the_same() -> None:
    inputs = tokens(401, dtype=torch.float32)
    plain = BlocksKernel(HEADS, DIM, window=20, region=40, blocks=16)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    call = AttentionCall(*inputs, scale=SCALE, layout=TokenLayout(1, (20, 20)))
    with torch.no_grad():
        assert_close(compiled(call), plain(call), 1e-5)
