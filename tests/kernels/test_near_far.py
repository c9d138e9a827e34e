"""near_far against its definition, its limits, and what its pieces promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import LargestTensor, attend
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.near_far import assign_reference, near_far_reference, region, views_reference
from reference.softmax import softmax_reference
from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape, TokenLayout
from latte_convert.errors import UsageError
from latte_convert.kernels.near_far.clustering import cell_counts, grid_cells, sums_by
from latte_convert.kernels.near_far.kernel import NearFarKernel, near_far_attention
from latte_convert.kernels.near_far.summary import TURNS, summarise
from latte_convert.kernels.near_far.windows import Places, Tiling
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.flops import measured_flops

HEADS, DIM, SCALE = 2, 20, 0.4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CASES = [  # prefix, grid or length, window, halo, clusters, steps, views
    (1, (6, 6), 2, 1, 9, 1, 1),
    (1, (6, 6), 2, 1, 9, 1, 4),
    (0, (5, 7), 3, 1, 6, 2, 2),
    (3, (7, 4), 2, 2, 4, 1, 8),
    (2, (1, 23), 3, 0, 5, 1, 1),
    (0, 37, 2, 1, 7, 3, 1),
    (0, 37, 2, 1, 7, 2, 4),
    (1, 30, 0, 0, 8, 1, 2),
    (0, (6, 5), 0, 0, 5, 0, 1),
    (1, (6, 6), 2, 1, 9, 0, 2),
    (5, 3, 1, 1, 2, 1, 8),
    (0, (4, 4), 9, 4, 4, 1, 1),
]


def size_of(grid: tuple[int, int] | int) -> int:
    return grid if isinstance(grid, int) else grid[0] * grid[1]


def tokens(
    queries: int, keys: int, *, dim: int = DIM, value_dim: int = DIM, dtype: Any = torch.float64
) -> list[Tensor]:
    """Query, key and value as views of ``(B, N, H, d)`` projections; queries have a mean, as in real models."""
    torch.manual_seed(queries + keys)
    sizes = [(queries, DIM), (keys, DIM), (keys, value_dim)]
    query, key, value = (torch.randn(2, n, HEADS, d, dtype=torch.float64).transpose(1, 2) for n, d in sizes)
    return [t.to(dtype) for t in (query + 1, key, value)]


def some_mask(keys: int) -> Tensor:
    """The first sample sees no key, the second about 60 %."""
    torch.manual_seed(keys)
    mask = torch.rand(2, keys) > 0.4
    mask[0] = False
    return mask


def parts(query: Tensor, key: Tensor, *, mask: Tensor | None = None, **call: Any) -> dict[str, Tensor]:
    """The cluster of each key and the view of each query, as the kernel has them."""
    prefix, options = call.get("prefix", 0), {name: call[name] for name in ("scale", "clusters", "steps", "views")}
    places = Places.of(query.shape[2], key.shape[2], prefix, call.get("grid"), call.get("aligned", True))
    seen = None if mask is None else mask[:, prefix:].repeat_interleave(HEADS, dim=0)
    q, k = query.detach().flatten(0, 1), key.detach()[:, :, prefix:].flatten(0, 1)
    found = summarise(q, k, k, places, seen=seen, **options)
    view = torch.zeros(len(q), found.order.shape[1:].numel(), dtype=torch.long)
    for number in range(found.order.shape[1]):
        view.scatter_(1, found.order[:, number], number)
    view = view[:, : query.shape[2]].reshape(query.shape[:3])
    return {"assign": found.assign.reshape(*key.shape[:2], -1), "view": view}


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- parity with the definition ---


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_the_reference(case: tuple[Any, ...], masked: bool) -> None:
    prefix, grid, window, halo, clusters, steps, views = case
    count = size_of(grid)
    inputs = [t.requires_grad_() for t in tokens(count, prefix + count, value_dim=6)]
    mask = some_mask(prefix + count) if masked else None
    grid = None if isinstance(grid, int) else grid
    call = {"scale": SCALE, "prefix": prefix, "grid": grid, "mask": mask}
    far = {"clusters": clusters, "steps": steps, "views": views}
    actual = near_far_attention(*inputs, window=window, halo=halo, **far, **call)
    expected = near_far_reference(*inputs, **parts(*inputs[:2], **far, **call), window=window, halo=halo, **call)
    assert_close(actual, expected, 1e-9)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (actual, expected))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("samples", "heads"), [(2, HEADS), (1, HEADS), (2, 1)])
@pytest.mark.parametrize("case", CASES)
def test_a_bias_is_as_the_reference_has_it(case: tuple[Any, ...], samples: int, heads: int, masked: bool) -> None:
    prefix, grid, window, halo, clusters, steps, views = case
    count = size_of(grid)
    inputs = [t.requires_grad_() for t in tokens(count, prefix + count, value_dim=6)]
    bias = torch.randn(samples, heads, count, prefix + count, dtype=torch.float64, requires_grad=True)
    mask = some_mask(prefix + count) if masked else None
    grid = None if isinstance(grid, int) else grid
    call = {"scale": SCALE, "prefix": prefix, "grid": grid, "mask": mask}
    far = {"clusters": clusters, "steps": steps, "views": views}
    actual = near_far_attention(*inputs, window=window, halo=halo, **far, **call, bias=bias)
    places = parts(*inputs[:2], **far, **call)
    expected = near_far_reference(*inputs, **places, window=window, halo=halo, **call, bias=bias)
    assert_close(actual, expected, 1e-9)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, [*inputs, bias], upstream) for out in (actual, expected))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, 1e-8)
    with torch.no_grad():
        assert_close(near_far_attention(*inputs, window=window, halo=halo, **far, **call, bias=bias), actual, 1e-9)


def test_a_bias_of_other_queries_and_of_a_prefix() -> None:
    """Cross-attention, and the rows of exact prefix queries."""
    inputs, bias = tokens(9, 37), torch.randn(2, HEADS, 9, 37, dtype=torch.float64)
    call = {"scale": SCALE, "prefix": 1, "grid": (6, 6)}
    far = {"clusters": 9, "steps": 1, "views": 2}
    out = near_far_attention(*inputs, **far, **call, aligned=False, bias=bias)
    places = parts(*inputs[:2], **far, **call, aligned=False)
    assert_close(out, near_far_reference(*inputs, **places, window=0, **call, bias=bias), 1e-9)
    inputs, bias = tokens(66, 66), 3 * torch.randn(1, HEADS, 66, 66, dtype=torch.float64)
    layout = TokenLayout(prefix=2, grid=(8, 8))
    out = kernel(window=2, halo=1, clusters=4)(AttentionCall(*inputs, SCALE, layout=layout, bias=bias))
    assert_close(out[:, :, :2], softmax(*inputs, bias)[:, :, :2], 1e-9)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("views", [1, 4])
def test_keys_and_a_bias_that_are_equal_within_each_cluster_are_attended_to_exactly(window: int, views: int) -> None:
    query, _, value = tokens(144, 144)
    cells = grid_cells((12, 12), 16, value.device)
    if window:  # what is left of a cluster beside a region has the value of the whole
        value = value[:, :, :16][:, :, cells]
    key = torch.randn(2, HEADS, 16, DIM, dtype=torch.float64)[:, :, cells]
    bias = 3 * torch.randn(2, HEADS, 144, 16, dtype=torch.float64)[..., cells]
    call = {"scale": SCALE, "grid": (12, 12), "window": window, "halo": 1, "clusters": 16, "views": views}
    for steps in (0, 1):
        out = near_far_attention(query, key, value, **call, steps=steps, bias=bias)
        assert_close(out, softmax(query, key, value, bias), 1e-9)
    assert float((near_far_attention(query, key, value, **call) - out).norm() / out.norm()) > 0.1


def test_the_bias_of_padding_and_of_other_samples_does_not_matter() -> None:
    inputs, bias = tokens(50, 50), torch.randn(2, HEADS, 50, 50, dtype=torch.float64)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[0, 37:] = False
    apply = kernel(window=2, halo=0, clusters=5)
    out = apply(AttentionCall(*inputs, SCALE, mask, bias=bias))
    short = [t[:1, :, :37] for t in inputs]
    alone = apply(AttentionCall(*short, SCALE, bias=bias[:1, :, :37, :37]))
    assert_close(out[:1, :, :37], alone, 1e-9)


def softmax(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (SCALE * query @ key.mT + bias).softmax(-1) @ value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_keys_and_queries_are_divided_as_the_reference_does(case: tuple[Any, ...], masked: bool) -> None:
    prefix, grid, _, _, clusters, steps, views = case
    count = size_of(grid)
    query, key, _ = tokens(count, prefix + count)
    mask = some_mask(prefix + count) if masked else None
    grid = None if isinstance(grid, int) else grid
    call = {"scale": SCALE, "prefix": prefix, "grid": grid, "mask": mask}
    actual = parts(query, key, clusters=clusters, steps=steps, views=views, **call)
    inner = None if mask is None else mask[:, prefix:]
    assign = assign_reference(
        query,
        key[:, :, prefix:],
        scale=SCALE,
        grid=grid,
        cells=cell_counts(grid or (count, 1), clusters),
        channels=16,
        steps=steps,
        mask=inner,
    )
    view = views_reference(query, key[:, :, prefix:], views=views, channels=16, turns=TURNS, mask=inner)
    seen = torch.ones_like(assign, dtype=torch.bool) if inner is None else inner[:, None].expand_as(assign)
    assert torch.equal(actual["assign"][seen], assign[seen])
    together, expected = (v[..., None] == v[..., None, :] for v in (actual["view"], view))  # halves have no first
    assert torch.equal(together[seen], expected[seen])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("masked", [False, True])
def test_every_dtype_with_and_without_gradients(dtype: torch.dtype, masked: bool) -> None:
    inputs = tokens(64, 66, dtype=dtype)
    mask = some_mask(66) if masked else None
    call = {"scale": SCALE, "prefix": 2, "grid": (8, 8), "mask": mask}
    far = {"clusters": 9, "steps": 1, "views": 2}
    expected = near_far_reference(*inputs, **parts(*inputs[:2], **far, **call), window=3, halo=1, **call)
    settings_ = {"window": 3, "halo": 1, **far, **call}
    with torch.no_grad():
        assert_close(near_far_attention(*inputs, **settings_), expected, TOLERANCE[dtype])
    inputs = [t.requires_grad_() for t in inputs]
    out = near_far_attention(*inputs, **settings_)
    assert_close(out.detach(), expected, TOLERANCE[dtype])
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("views", [1, 2])
def test_cross_attention_sees_prefix_and_clusters(masked: bool, views: int) -> None:
    inputs = tokens(5, 32)
    call = {"scale": SCALE, "prefix": 2, "grid": (5, 6), "mask": some_mask(32) if masked else None}
    far = {"clusters": 9, "steps": 1, "views": views}
    out = near_far_attention(*inputs, aligned=False, **far, **call)
    found = parts(*inputs[:2], aligned=False, **far, **call)
    assert_close(out, near_far_reference(*inputs, **found, **call), 1e-9)


@pytest.mark.parametrize("views", [1, 4])
@pytest.mark.parametrize("strided", [0, 1, 2])
def test_channels_need_not_be_next_to_each_other(views: int, strided: int) -> None:
    inputs = tokens(256, 256, dtype=torch.float32)
    call = {"scale": SCALE, "grid": (16, 16), "window": 4, "halo": 1, "clusters": 8, "views": views}
    with torch.inference_mode():
        expected = near_far_attention(*inputs, **call)
        inputs[strided] = inputs[strided].mT.contiguous().mT  # as a convolution gives them
        assert_close(near_far_attention(*inputs, **call), expected, 1e-5)


# --- limits ---


def kernel(**options: Any) -> NearFarKernel:
    return NearFarKernel(HEADS, DIM, **options)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (None, 1),
        (None, 40),
        (TokenLayout(prefix=60), 40),
        (TokenLayout(prefix=40), 40),
        (TokenLayout(prefix=1, grid=(3, 13)), 40),
        (TokenLayout(prefix=1, grid=(8, 8)), 40),
        (TokenLayout(prefix=4, grid=(1, 36)), 40),
        (TokenLayout(prefix=4, grid=(6, 6), aligned=False), 40),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_window_over_the_whole_sequence_is_softmax(layout: TokenLayout | None, count: int, masked: bool) -> None:
    inputs = tokens(count, count, dtype=torch.float32)
    mask = some_mask(count) if masked else None
    if mask is not None:
        mask[1, :5] = mask[1, -1] = True  # no padding, which would be left out
    out = attend(kernel(window=64, clusters=128), *inputs, scale=SCALE, mask=mask, layout=layout)
    assert_close(out, softmax_reference(*inputs, scale=SCALE, mask=mask), 1e-5)


@pytest.mark.parametrize("halo", [3, 50])
def test_a_halo_over_the_whole_grid_is_softmax(halo: int) -> None:
    inputs = tokens(36, 37)
    out = near_far_attention(*inputs, scale=SCALE, prefix=1, grid=(6, 6), window=3, halo=halo, clusters=4)
    assert_close(out, softmax_reference(*inputs, scale=SCALE), 1e-9)


def test_a_cluster_for_every_key_is_softmax() -> None:
    inputs = tokens(36, 37)
    for window in (0, 2):
        call = {"window": window, "halo": 1, "clusters": 36, "steps": 0}
        out = near_far_attention(*inputs, scale=SCALE, prefix=1, grid=(6, 6), **call)
        assert_close(out, softmax_reference(*inputs, scale=SCALE), 1e-9)


def test_a_query_that_is_the_mean_of_all_gets_the_exact_answer() -> None:
    # The expansion is around the mean query, so with equal queries any clusters are exact.
    query, key, value = tokens(400, 400)
    query = query[:, :, :1].expand(-1, -1, 400, -1)
    out = near_far_attention(query, 3 * key, value, scale=SCALE, grid=(20, 20), window=0, clusters=5)
    assert_close(out, softmax_reference(query, 3 * key, value, scale=SCALE), 1e-9)


def test_prefix_queries_are_exact_and_prefix_keys_are_single() -> None:
    query, key, value = tokens(405, 405)
    layout = TokenLayout(prefix=5, grid=(20, 20))
    key[:, :, 3] = 8 * query.mean(2)  # a sink: nearly all that any query looks at
    out = attend(kernel(window=2, halo=1, clusters=4), query, key, value, scale=SCALE, layout=layout)
    expected = softmax_reference(query, key, value, scale=SCALE)
    assert_close(out[:, :, :5], expected[:, :, :5], 1e-9)
    assert_close(out[:, :, 5:], expected[:, :, 5:], 1e-3)


def test_more_clusters_steps_and_windows_are_nearer_to_softmax() -> None:
    torch.manual_seed(0)
    shape = (1, 2 * HEADS * DIM, 12, 12)
    smooth = torch.nn.functional.interpolate(torch.randn(shape), (24, 24), mode="bicubic")
    key, value = smooth.reshape(1, 2, HEADS, DIM, 576).transpose(3, 4).unbind(1)
    query = key + 0.5  # tokens look at those like themselves, most of which are near
    exact = softmax_reference(query, key, value, scale=0.3)
    steps = [
        {"window": 0, "far": "pooled", "clusters": 25},
        {"window": 0, "clusters": 25},
        {"window": 0, "clusters": 64},
        {"window": 4, "halo": 2, "clusters": 64},
        {"window": 4, "halo": 2, "clusters": 64, "steps": 3},
        {"window": 4, "halo": 2, "clusters": 64, "steps": 3, "views": 4},
    ]
    errors = []
    for options in steps:
        out = attend(kernel(**options), query, key, value, scale=0.3, layout=TokenLayout(grid=(24, 24)))
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * errors[0]


# --- masks ---


def test_what_is_masked_does_not_matter_be_it_query_key_or_value() -> None:
    inputs, mask = tokens(401, 401), some_mask(401)
    other = [torch.where(mask[:, None, :, None], t, 50 * torch.randn_like(t)) for t in inputs]
    call = {"scale": SCALE, "mask": mask, "layout": TokenLayout(prefix=1, grid=(20, 20))}
    out, changed = (attend(kernel(window=4, halo=1, clusters=16), *qkv, **call) for qkv in (inputs, other))
    seen = mask[:, None, :, None]
    assert_close(out * seen, changed * seen, 1e-9)


@pytest.mark.parametrize("views", [1, 8])
@pytest.mark.parametrize("seen", ["odd tokens", "a band of columns"])
def test_what_is_seen_may_be_anywhere(seen: str, views: int) -> None:
    # Statistics are those of some tokens: these have to be some of those that are seen.
    side = 64
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    waves = (places.float() @ torch.randn(2, HEADS * DIM)) / 24
    query, key, value = (
        (wave.sin() + 0.3).reshape(1, -1, HEADS, DIM).transpose(1, 2) for wave in (waves, waves, waves + 1)
    )
    index = torch.arange(side**2)
    mask = (index % 2 == 1 if seen == "odd tokens" else (index % side > 8) & (index % side < 16))[None]
    call = {"scale": SCALE, "mask": mask, "grid": (side, side)}
    out = near_far_attention(query, key, value, views=views, **call)
    exact = softmax_reference(query, key, value, scale=SCALE, mask=mask)
    assert float((out - exact).norm() / exact.norm()) < 0.05


# --- numerics, cost, memory ---


def test_threads_do_not_change_the_result() -> None:
    inputs = tokens(900, 900, dtype=torch.float32)
    outs = []
    far = {"clusters": 25, "views": 4}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(near_far_attention(*inputs, scale=SCALE, grid=(30, 30), window=5, halo=2, **far))
    assert torch.equal(*outs)


@pytest.mark.parametrize(("grid", "views"), [((256, 256), 1), (None, 1), ((256, 256), 8)])
@pytest.mark.parametrize("grad", [False, True])
def test_no_tensor_is_larger_than_a_few_of_the_inputs(grid: tuple[int, int] | None, views: int, grad: bool) -> None:
    inputs = [torch.randn(1, 1, 65536, 16) for _ in range(3)]
    with torch.set_grad_enabled(grad), LargestTensor() as largest:
        inputs[0].requires_grad_(grad)
        near_far_attention(*inputs, scale=0.25, grid=grid, views=views)
    # Windows go in blocks: all their logits at once would be 144 + 128 to a query.
    assert 65536 * 16 <= largest.numel <= 65536 * 32


@pytest.mark.parametrize("views", [1, 8])
def test_of_a_bias_there_is_no_second_copy(views: int) -> None:
    inputs = [torch.randn(1, 1, 4096, 16) for _ in range(3)]
    bias = torch.randn(1, 1, 4096, 4096).mT  # in another order than rows are read
    with torch.no_grad(), LargestTensor(bias) as largest:
        near_far_attention(*inputs, scale=0.25, grid=(64, 64), views=views, bias=bias)
    assert 0 < largest.numel <= 4096**2 / 6


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2, "halo": 2, "clusters": 36, "steps": 2},
        {"window": 5, "halo": 1, "clusters": 20},
        {"window": 4, "halo": 1, "clusters": 20, "views": 8},
        {"window": 0, "clusters": 50, "views": 2},
        {"far": "pooled", "clusters": 100},
        {"window": 0, "clusters": 100},
    ],
)
@pytest.mark.parametrize(("grid", "prefix"), [((40, 40), 1), ((33, 29), 4), (None, 2)])
def test_flops_are_those_that_run(options: dict[str, Any], grid: tuple[int, int] | None, prefix: int) -> None:
    count = prefix + (grid[0] * grid[1] if grid else 1000)
    inputs = tokens(count, count, dtype=torch.float32)
    layout = TokenLayout(prefix=prefix, grid=grid)
    one = [t[:1] for t in inputs]
    shape = CallShape(count, count, HEADS, DIM, DIM, layout=layout)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            one[0].requires_grad_(grad)
            counted, _ = measured_flops(lambda: attend(kernel(**options), *one, scale=SCALE, layout=layout))
        assert kernel(**options).flops(shape) - 2 * HEADS * sums(count - prefix, **options) == counted
        one[0].requires_grad_(False)
    assert counted < softmax_flops(shape)


def sums(tokens: int, *, far: str = "clustered", steps: int = 1, views: int = 1, **_sizes: int) -> int:
    """Additions to means, which a counter of matmuls does not see: of clusters, in k-means and then, and of views."""
    return tokens * (16 * steps * (far == "clustered") + views * 2 * DIM + (views > 1) * DIM)


def test_flops_are_linear_in_the_tokens() -> None:
    shapes = [CallShape(n * n, n * n, 12, 64, 64, layout=TokenLayout(grid=(n, n))) for n in (64, 128, 256)]
    small, middle, large = (NearFarKernel(12, 64).flops(shape) for shape in shapes)
    assert middle / small == pytest.approx(4, rel=0.03)
    assert large / middle == pytest.approx(4, rel=0.01)


def test_it_never_costs_more_than_softmax() -> None:
    for count in (1, 2, 9, 65, 197, 577):
        shape = CallShape(count, count, 12, 64, 64, layout=TokenLayout(prefix=1))
        assert NearFarKernel(12, 64).flops(shape) <= softmax_flops(shape)


# --- pieces ---


@given(height=st.integers(1, 20), width=st.integers(1, 20), window=st.integers(1, 9), halo=st.integers(0, 6))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_regions_hold_what_the_reference_says(height: int, width: int, window: int, halo: int) -> None:
    for grid in ((height, width), None):
        count = height * width
        tiling = Tiling.of(grid, count, window, halo)
        numbers = torch.arange(1, count + 1)[None, :, None]
        windows = tiling.windows(numbers)
        assert torch.equal(tiling.merge(windows.flatten(0, 2).flatten(1, 2)), numbers)
        regions = tiling.regions(numbers).reshape(tiling.number, -1)
        for own, around in zip(windows.reshape(tiling.number, -1).tolist(), regions.tolist(), strict=True):
            members = [token - 1 for token in own if token]
            inside = [token - 1 for token in around if token]
            assert len(inside) == len(set(inside))
            assert all(set(inside) == region(token, grid, count, window, halo) for token in members)


@given(height=st.integers(1, 40), width=st.integers(1, 40), clusters=st.integers(1, 300))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_cells_fill_the_grid_and_keep_to_the_cap(height: int, width: int, clusters: int) -> None:
    rows, columns = cell_counts((height, width), clusters)
    assert 1 <= rows * columns <= clusters
    sizes = grid_cells((height, width), clusters, torch.device("cpu")).bincount(minlength=rows * columns)
    assert sizes.min() >= 1
    assert len(sizes) == rows * columns
    if clusters >= height * width:
        assert rows * columns == height * width


def test_sums_by_index() -> None:
    index, values = torch.tensor([2, 0, 2, 2]), torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    expected = torch.tensor([[3.0, 4], [0, 0], [13, 16]])
    assert torch.equal(sums_by(index, values, 3), expected)


@pytest.mark.parametrize(
    "options",
    [{"window": -1}, {"halo": -1}, {"clusters": 0}, {"steps": 0}, {"views": 3}, {"far": "median"}, {"window": 2.5}],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))}(=|` is ){next(iter(options.values()))!r}"):
        kernel(**options)


@pytest.mark.slow
@pytest.mark.parametrize("views", [1, 4])
def test_compiled_it_gives_the_same(views: int) -> None:
    inputs = tokens(100, 100, dtype=torch.float32)
    call = {"scale": SCALE, "layout": TokenLayout(grid=(10, 10))}
    plain = kernel(window=3, halo=1, clusters=9, views=views)
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close(attend(compiled, *inputs, **call), attend(plain, *inputs, **call), 1e-5)


def test_without_a_number_there_is_a_far_key_for_eight_tokens_up_to_128() -> None:
    for count, clusters in ((256, 32), (2048, 128)):
        inputs = tokens(count, count, dtype=torch.float32)
        free, given = kernel(window=4), kernel(window=4, clusters=clusters)
        assert torch.equal(attend(free, *inputs, scale=SCALE), attend(given, *inputs, scale=SCALE))
        shape = CallShape(count, count, free.heads, free.head_dim, free.head_dim)
        assert free.flops(shape) == given.flops(shape)
