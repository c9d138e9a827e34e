"""What every kernel promises, for every name in the registry."""

from __future__ import annotations

import json
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from comparing import TOLERANCE, LargestTensor, assert_close
from reference.softmax import softmax_reference
from torch import Tensor

from latte_convert.attention import AttentionCall, CallShape, Merged, TokenLayout
from latte_convert.errors import UsageError
from latte_convert.kernels import Kernel, get_kernel, kernel_names
from latte_convert.measuring.flops import measured_flops

HEADS, DIM, SCALE = 2, 16, 0.25
GRID = (8, 8)
TOKENS = 1 + GRID[0] * GRID[1]
LAYOUT = TokenLayout(prefix=1, grid=GRID)
OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {"window": 8, "region": 8, "blocks": 4, "opened": 1},
    "near_far": {"window": 2, "halo": 1, "clusters": 4, "views": 2},
    "near_past": {"window": 2, "halo": 1, "clusters": 4},
}
"""What makes a kernel do its own thing on so few tokens: by default these run softmax here."""
BLOCKWISE = {"blocks", "monarch", "near_far", "near_past"}
"""Kernels for which a masked key still has its place in a block or window: removing it moves the others."""
SUMS = {"near_far", "near_past"}
"""Kernels that count sums that no counter sees, too."""
every_kernel = pytest.mark.parametrize("name", kernel_names())


def build(name: str, *, dim: int = DIM, **options: Any) -> Kernel:
    """A kernel whose parameters are a little off their initial values."""
    torch.manual_seed(3)
    kernel = get_kernel(name)(HEADS, dim, **{**OPTIONS.get(name, {}), **options})
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return kernel


def tokens(*counts: int, dim: int = DIM, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value as views of ``(B, N, H, d)`` projections; two counts are those of queries and keys."""
    queries, keys = (counts * 2)[:2]
    return [torch.randn(2, n, HEADS, dim).transpose(1, 2).to(dtype) for n in (queries, keys, keys)]


def first_sample_masked(keys: int) -> Tensor:
    """The first sample sees no key, the second about half of them."""
    mask = torch.rand(2, keys) > 0.5
    mask[0], mask[1, 0] = False, True
    return mask


def attend(kernel: Kernel, inputs: list[Tensor], **call: Any) -> Tensor:
    return kernel(AttentionCall(*inputs, scale=SCALE, **{"layout": LAYOUT, **call}))


# --- outputs ---


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_shape_and_dtype_of_the_query_and_is_finite_at_large_logits(
    name: str, dtype: torch.dtype
) -> None:
    kernel = build(name)
    query, key, value = tokens(TOKENS)
    largest = (SCALE * query @ key.mT).abs().max()
    query, key = query * (50 / largest).sqrt(), key * (50 / largest).sqrt()
    inputs = [t.to(dtype) for t in (query, key, value)]
    for causal in (False, True) if kernel.causal_form else (False,):
        out = attend(kernel, inputs, causal=causal)
        assert out.shape == query.shape
        assert out.dtype is dtype
        assert out.isfinite().all()


@every_kernel
def test_queries_and_keys_may_be_different_tokens_or_the_kernel_says_no(name: str) -> None:
    kernel, inputs = build(name), tokens(9, TOKENS)
    across = TokenLayout(prefix=1, grid=GRID, aligned=False)
    if kernel.cross_form:
        assert attend(kernel, inputs, layout=across).shape == (2, HEADS, 9, DIM)
    else:
        with pytest.raises(UsageError, match=name):
            attend(kernel, inputs, layout=across)


@every_kernel
def test_the_future_does_not_change_the_past_or_the_kernel_says_no(name: str) -> None:
    kernel, inputs = build(name), tokens(130)
    if not kernel.causal_form:
        with pytest.raises(UsageError, match=name):
            attend(kernel, inputs, causal=True, layout=TokenLayout())
        return
    for last in (1, 64, 100):
        changed = [torch.cat([t[:, :, :last], 50 * torch.randn_like(t[:, :, last:])], dim=2) for t in inputs]
        out, other = (attend(kernel, qkv, causal=True, layout=TokenLayout()) for qkv in (inputs, changed))
        # Not bit for bit: where a tensor lies in memory decides how its products are summed up.
        torch.testing.assert_close(out[:, :, :last], other[:, :, :last], rtol=0, atol=2e-6)
        assert not torch.equal(out[:, :, last:], other[:, :, last:])


@every_kernel
def test_two_runs_are_equal(name: str) -> None:
    kernel, inputs = build(name), tokens(TOKENS)
    assert torch.equal(attend(kernel, inputs), attend(kernel, inputs))


@every_kernel
def test_options_and_state_rebuild_the_kernel(name: str) -> None:
    for extras in ({}, {"exact_prefix": True, "key_shift": True, "sigma": True, "bias": True, "output_map": True}):
        kernel, inputs = build(name, **extras), tokens(TOKENS)
        torch.manual_seed(99)  # whatever is random must come from the options or the state
        rebuilt = get_kernel(name)(HEADS, DIM, **json.loads(json.dumps(kernel.options)))
        rebuilt.load_state_dict(kernel.state_dict(), strict=True)
        assert rebuilt.options == kernel.options
        assert torch.equal(attend(rebuilt, inputs), attend(kernel, inputs))


@every_kernel
def test_fitted_state_is_float32(name: str) -> None:
    state = build(name, sigma=True, bias=True).state_dict()
    assert {"sigma", "bias"} <= set(state)
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}


@every_kernel
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="zzz"):
        get_kernel(name)(HEADS, DIM, zzz=1)  # type: ignore[call-arg]


@every_kernel
@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_is_its_samples(name: str, masked: bool) -> None:
    kernel, inputs = build(name), tokens(TOKENS)
    mask = first_sample_masked(TOKENS) if masked else None
    for causal in (False, True) if kernel.causal_form else (False,):
        batched = attend(kernel, inputs, mask=mask, causal=causal)
        for i in range(2):
            own = None if mask is None else mask[i : i + 1]
            alone = attend(kernel, [t[i : i + 1] for t in inputs], mask=own, causal=causal)
            torch.testing.assert_close(batched[i : i + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(kernel_names()) - BLOCKWISE))
def test_permuting_the_tokens_permutes_the_output(name: str) -> None:
    kernel, inputs, order = build(name), tokens(90), torch.randperm(90)
    out, permuted = (attend(kernel, t, layout=TokenLayout()) for t in (inputs, [t[:, :, order] for t in inputs]))
    torch.testing.assert_close(permuted, out[:, :, order], rtol=1e-5, atol=1e-5)


@every_kernel
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_inputs_stay_as_they_are_and_gradients_change_nothing(name: str, contiguous: bool) -> None:
    kernel = build(name, sigma=True)
    inputs = [t.contiguous() if contiguous else t for t in tokens(TOKENS)]
    before = [t.clone() for t in inputs]
    for causal in (False, True) if kernel.causal_form else (False,):
        with torch.no_grad():
            out = attend(kernel, inputs, causal=causal)
        assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))
        torch.testing.assert_close(out, attend(kernel, inputs, causal=causal), rtol=1e-5, atol=1e-5)


@every_kernel
def test_shapes_are_inferred_without_numbers(name: str) -> None:
    kernel, inputs = build(name).to("meta"), [each.to("meta") for each in tokens(TOKENS)]
    for causal in (False, True) if kernel.causal_form else (False,):
        out = attend(kernel, inputs, causal=causal)
        assert (out.shape, out.device.type) == (inputs[0].shape, "meta")


# --- numerics ---


@pytest.mark.parametrize("name", sorted(set(kernel_names()) - {"exact"}))  # PyTorch's softmax follows autocast
def test_autocast_keeps_everything_in_float32(name: str) -> None:
    kernel, inputs, layout = build(name), tokens(64), TokenLayout(grid=GRID)  # a prefix may be exact
    for causal in (False, True) if kernel.causal_form else (False,):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(kernel, inputs, causal=causal, layout=layout)
        assert torch.equal(out, attend(kernel, inputs, causal=causal, layout=layout))


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_keys_stay_finite_and_accurate_at_many_tokens(name: str, dtype: torch.dtype) -> None:
    kernel = get_kernel(name)(1, DIM)
    inputs = [torch.randn(1, 1, 2048, DIM).to(dtype) for _ in range(3)]
    inputs[1] = inputs[1] * 50
    # Clusters are chosen in float32: in float64 a key between two of them may fall to the other.
    wide = torch.float32 if kernel.mixes_queries else torch.float64
    for causal in (False, True) if kernel.causal_form else (False,):
        layout = TokenLayout(grid=None if causal else (32, 64))
        with torch.no_grad():
            out = attend(kernel, inputs, causal=causal, layout=layout)
            expected = attend(kernel, [t.to(wide) for t in inputs], causal=causal, layout=layout)
        assert_close(out, expected.to(dtype), TOLERANCE[dtype])


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_costs_a_kernel_no_more_than_it_costs_softmax(name: str, dtype: torch.dtype) -> None:
    """Against softmax in float64, which both are to compute.

    Against its own float32 a kernel of clusters or blocks may differ more: a key between two of them can fall to the
    other, and either choice approximates the same softmax, now better, now worse. So draws are averaged, and the mean
    may exceed the bound by what chance makes of it.
    """
    kernel, layout = get_kernel(name)(HEADS, DIM), TokenLayout(prefix=1, grid=(20, 20))
    target = get_kernel("exact")(HEADS, DIM)
    more, allowed = [], []
    for _ in range(12):
        query, key, value = tokens(401)
        inputs = [query + 3 * torch.randn(1, HEADS, 1, DIM), key + 3 * torch.randn(1, HEADS, 1, DIM), value]
        with torch.no_grad():
            exact = attend(target, [t.double() for t in inputs], layout=layout)
            error = {
                (each.name, kind): float(
                    (attend(each, [t.to(kind) for t in inputs], layout=layout).double() - exact).norm()
                )
                for each in (kernel, target)
                for kind in (torch.float32, dtype)
            }
        more.append((error[name, dtype] - error[name, torch.float32]) / float(exact.norm()))
        allowed.append(1.5 * error[target.name, dtype] / float(exact.norm()))
    chance = 3 * stdev(more) / len(more) ** 0.5
    assert fmean(more) <= fmean(allowed) + chance
    assert chance < 0.02


# --- masks ---


@pytest.mark.parametrize("name", sorted(set(kernel_names()) - BLOCKWISE))
def test_masking_keys_is_removing_them(name: str) -> None:
    kernel = build(name)
    query, key, value = tokens(TOKENS)
    key[:, :, 7] *= 30  # a masked key may be far larger than those that are seen
    seen = torch.rand(TOKENS) > 0.4
    seen[7] = False
    masked = attend(kernel, [query, key, value], mask=seen.expand(2, -1), layout=TokenLayout())
    removed = attend(kernel, [query, key[:, :, seen], value[:, :, seen]], layout=TokenLayout())
    torch.testing.assert_close(masked, removed, rtol=1e-5, atol=1e-5)


@every_kernel
def test_what_is_masked_does_not_matter(name: str) -> None:
    kernel, inputs, mask = build(name), tokens(TOKENS), first_sample_masked(TOKENS)
    hidden = ~mask[:, None, :, None]
    # The queries stay: they may be those of the same tokens.
    other = [inputs[0], *(torch.where(hidden, 7 * torch.randn_like(t), t) for t in inputs[1:])]
    torch.testing.assert_close(
        attend(kernel, inputs, mask=mask), attend(kernel, other, mask=mask), rtol=1e-4, atol=1e-5
    )


@every_kernel
def test_a_sample_without_keys_is_zero_and_no_gradient_is_nan(name: str) -> None:
    kernel = build(name, sigma=True, bias=True, output_map=True, key_shift=True)
    for causal in (False, True) if kernel.causal_form else (False,):
        inputs = [t.requires_grad_() for t in tokens(TOKENS)]
        out = attend(kernel, inputs, mask=first_sample_masked(TOKENS), causal=causal)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out[1].abs().sum() > 0
        trained = [*inputs, *kernel.parameters()]
        gradients = torch.autograd.grad(out.square().sum(), trained, allow_unused=True)
        assert all(g.isfinite().all() for g in gradients if g is not None)
        assert gradients[2] is not None
        assert gradients[2].any()


# --- edges ---


@every_kernel
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 9, 9), (2, 0, 9), (2, 9, 0), (2, 0, 0)])
def test_without_samples_queries_or_keys_there_are_zeros(
    name: str, batch: int, queries: int, keys: int, masked: bool
) -> None:
    kernel = build(name, exact_prefix=True, sigma=True, bias=True, output_map=True, key_shift=True)
    for causal in (False, True) if kernel.causal_form else (False,):
        inputs = [t[:batch] for t in tokens(queries, keys)]
        mask = torch.ones(batch, keys, dtype=torch.bool) if masked else None
        out = attend(kernel, inputs, mask=mask, causal=causal)
        assert torch.equal(out, torch.zeros(batch, HEADS, queries, DIM))


@every_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_behind_a_mask_stays_there(name: str, bad: float) -> None:
    kernel, mask = build(name, exact_prefix=True), first_sample_masked(TOKENS)
    query, key, value = tokens(TOKENS)
    for causal in (False, True) if kernel.causal_form else (False,):
        hidden = ~mask[:, None, :, None]
        spoilt = [query, *(t.masked_fill(hidden, bad) for t in (key, value))]
        leaves = [t.clone().requires_grad_() for t in spoilt]
        out = attend(kernel, leaves, mask=mask, causal=causal)
        torch.testing.assert_close(out, attend(kernel, [query, key, value], mask=mask, causal=causal))
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@every_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_query_that_is_not_finite_spoils_no_other(name: str, bad: float) -> None:
    kernel, (query, key, value) = build(name), tokens(TOKENS)
    for causal in (False, True) if kernel.causal_form else (False,):
        spoilt = query.clone()
        spoilt[1, 0, 20, 3] = bad
        expected, out = (attend(kernel, [q, key, value], causal=causal) for q in (query, spoilt))
        lost = torch.zeros(out.shape[:3], dtype=torch.bool)
        lost[1, 0, 20] = True
        assert out[~lost].isfinite().all()
        if bad != bad:
            assert out[lost].isnan().all()
        same = ~lost
        if kernel.mixes_queries:  # those that it was to be grouped with see it missing
            same[1, 0] = False
        torch.testing.assert_close(out[same], expected[same])


MERGING = [name for name in kernel_names() if get_kernel(name).takes_merged]


def merged(batch: int = 2) -> Merged:
    return Merged(torch.randint(1, 9, (batch, TOKENS)).float(), 8 * torch.rand(batch, TOKENS - 1, 2))


def test_who_takes_merged_tokens() -> None:
    assert {"exact", "blocks"} <= set(MERGING)
    for name in set(kernel_names()) - set(MERGING):
        with pytest.raises(UsageError, match="merged tokens"):
            attend(build(name), tokens(TOKENS), merged=merged())
    for name in MERGING:
        with pytest.raises(UsageError, match="merged tokens have no form for masks"):
            attend(build(name), tokens(TOKENS), merged=merged(), mask=first_sample_masked(TOKENS))


@pytest.mark.parametrize("name", MERGING)
def test_merged_tokens_without_samples(name: str) -> None:
    out = attend(build(name), [t[:0] for t in tokens(TOKENS)], merged=merged(0))
    assert out.shape == (0, HEADS, TOKENS, DIM)


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_merged_query_that_is_not_finite_spoils_no_other(name: str, bad: float) -> None:
    query, key, value = tokens(TOKENS)
    query[1, 0, 20, 3] = bad
    out = attend(build(name), [query, key, value], merged=merged())
    lost = torch.zeros(out.shape[:3], dtype=torch.bool)
    lost[1, 0, 20] = True
    assert out[~lost].isfinite().all()


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_merged_tokens_of_large_logits_are_finite(name: str, dtype: torch.dtype) -> None:
    inputs = [(20 * t).to(dtype) for t in tokens(TOKENS)]
    out = attend(build(name), inputs, merged=merged())
    assert out.dtype is dtype
    assert out.isfinite().all()


BIASED = [name for name in kernel_names() if get_kernel(name).takes_bias]


def test_who_takes_a_bias() -> None:
    assert {"exact", "near_far"} <= set(BIASED)
    for name in set(kernel_names()) - set(BIASED):
        with pytest.raises(UsageError, match=f"'{name}' has no form for a bias on the logits"):
            attend(build(name), tokens(TOKENS), bias=torch.zeros(1, 1, TOKENS, TOKENS))
    with pytest.raises(UsageError, match="bias is of shape"):
        attend(build("exact"), tokens(TOKENS), bias=torch.zeros(TOKENS, TOKENS))


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("shape", [(2, HEADS, TOKENS, TOKENS), (1, HEADS, TOKENS, TOKENS), (2, 1, 1, TOKENS)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bias_is_broadcast_and_of_each_sample(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kernel, inputs = build(name, exact_prefix=True), [t.to(dtype) for t in tokens(TOKENS)]
    bias = (3 * torch.randn(shape)).to(dtype)
    for mask in (None, first_sample_masked(TOKENS)):
        out = attend(kernel, inputs, mask=mask, bias=bias)
        assert out.dtype is dtype
        assert out.isfinite().all()
        whole = bias.expand(2, HEADS, TOKENS, TOKENS)
        for i in range(2):
            own = None if mask is None else mask[i : i + 1]
            alone = attend(kernel, [t[i : i + 1] for t in inputs], mask=own, bias=whole[i : i + 1])
            torch.testing.assert_close(out[i : i + 1], alone, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_of_zeros_is_none(name: str) -> None:
    kernel, inputs = build(name), tokens(TOKENS)
    out = attend(kernel, inputs, bias=torch.zeros(1, 1, TOKENS, TOKENS))
    torch.testing.assert_close(out, attend(kernel, inputs), rtol=1e-5, atol=1e-5)


# --- extras ---


@every_kernel
def test_sigma_then_map_then_bias_on_the_output(name: str) -> None:
    plain = build(name)
    kernel = build(name, sigma=True, bias=True, output_map=True)
    kernel.load_state_dict(plain.state_dict(), strict=False)
    assert kernel.sigma is not None
    assert kernel.bias is not None
    assert kernel.output_map is not None
    inputs, mask = tokens(64), first_sample_masked(64)
    layout = TokenLayout(grid=GRID)  # without a prefix, whose rows a kernel may keep exact
    with torch.no_grad():
        for parameter in (kernel.sigma, kernel.bias, kernel.output_map):
            parameter.copy_(torch.randn_like(parameter))
        for causal in (False, True) if kernel.causal_form else (False,):
            call = {"mask": mask, "causal": causal, "layout": layout}
            heads = attend(plain, inputs, **call).transpose(1, 2) * kernel.sigma.reshape(HEADS, DIM)
            expected = torch.einsum("bnhc,hce->bnhe", heads, kernel.output_map) + kernel.bias.reshape(HEADS, DIM)
            expected[0] = 0
            actual = attend(kernel, inputs, **call).transpose(1, 2)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@every_kernel
def test_the_shift_is_subtracted_from_the_keys(name: str) -> None:
    plain = build(name)
    kernel = build(name, key_shift=True)
    kernel.load_state_dict(plain.state_dict(), strict=False)
    query, key, value = tokens(TOKENS)
    assert kernel.shift is not None
    with torch.no_grad():
        kernel.shift.copy_(torch.randn_like(kernel.shift))
    shifted = attend(kernel, [query, key, value])
    expected = attend(plain, [query, key - kernel.shift[:, None], value])
    torch.testing.assert_close(shifted, expected, rtol=1e-5, atol=1e-5)
    if name == "exact":
        torch.testing.assert_close(shifted, attend(plain, [query, key, value]), rtol=1e-5, atol=1e-5)


@every_kernel
@pytest.mark.parametrize("masked", [False, True])
def test_exact_prefix_rows_are_softmax(name: str, masked: bool) -> None:
    plain = build(name)
    kernel = build(name, exact_prefix=True)
    kernel.load_state_dict(plain.state_dict())
    layout = TokenLayout(prefix=3, grid=GRID)
    inputs = tokens(3 + 64)
    mask = first_sample_masked(3 + 64) if masked else None
    out = attend(kernel, inputs, mask=mask, layout=layout)
    expected = softmax_reference(inputs[0][:, :, :3], *inputs[1:], scale=SCALE, mask=mask)
    torch.testing.assert_close(out[:, :, :3], expected, rtol=1e-5, atol=1e-5)
    assert out.shape == inputs[0].shape
    if name not in BLOCKWISE:
        rest = attend(plain, inputs, mask=mask, layout=layout)[:, :, 3:]
        torch.testing.assert_close(out[:, :, 3:], rest, rtol=1e-5, atol=1e-5)


# --- cost ---


@pytest.mark.parametrize("name", sorted(set(kernel_names()) - {"exact"}))
def test_no_tensor_is_more_than_a_few_times_the_inputs(name: str) -> None:
    count = 1024
    kernel = get_kernel(name)(1, DIM)
    inputs = [torch.randn(1, 1, count, DIM) for _ in range(3)]
    bound = 8 * 4 * count * DIM  # query, key, value and output; half of count²
    for causal in (False, True) if kernel.causal_form else (False,):
        with torch.no_grad(), LargestTensor() as largest:
            attend(kernel, inputs, causal=causal, layout=TokenLayout(grid=None if causal else (32, 32)))
        assert count * DIM <= largest.numel <= bound


@pytest.mark.parametrize("name", sorted(set(kernel_names()) - SUMS))
@pytest.mark.parametrize("exact_prefix", [False, True])
def test_flops_are_those_that_run(name: str, exact_prefix: bool) -> None:
    dim = 32
    kernel = build(name, dim=dim, exact_prefix=exact_prefix)
    query, key, value = (t[:1] for t in tokens(TOKENS, dim=dim))
    with torch.no_grad():
        counted, _ = measured_flops(lambda: attend(kernel, [query, key, value]))
    shape = CallShape(TOKENS, TOKENS, HEADS, dim, dim, layout=LAYOUT)
    assert kernel.flops(shape) > 0
    assert kernel.flops(shape) == pytest.approx(counted, rel=0.02)


LINEAR = [name for name in kernel_names() if get_kernel(name).causal_form and name not in {"exact", *SUMS}]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (130, 70), (50, 150)])
def test_flops_of_every_shape_are_those_that_run(name: str, queries: int, keys: int, causal: bool) -> None:
    kernel, inputs = build(name), [t[:1] for t in tokens(queries, keys)]
    inputs[2] = inputs[2][..., :-1]
    with torch.no_grad():
        counted, _ = measured_flops(lambda: attend(kernel, inputs, causal=causal, layout=TokenLayout()))
    # The plain sum over values is a product with a row of ones in LATTE's bidirectional form.
    padding = 2 * keys * HEADS * (DIM - 1) if kernel.folds_sigma and not causal else 0
    assert kernel.flops(CallShape(queries, keys, HEADS, DIM, DIM - 1, causal=causal)) + padding == counted
