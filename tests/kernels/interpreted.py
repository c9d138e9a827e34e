"""The Triton kernels against the definitions and against PyTorch, in Triton's interpreter.

``test_triton.py`` runs this file in a process of its own: Triton decides when it is imported what runs its kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import TOLERANCE, assert_close, attend
from reference.latte import latte_reference
from reference.near_far import assign_reference, near_far_reference
from torch import Tensor

from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.kernels import get_kernel
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.device import interpreted, runs_in_triton
from latte_convert.kernels.latte.kernel import latte_attention
from latte_convert.kernels.near_far.clustering import assignment_channels, cell_counts
from latte_convert.kernels.near_far.kernel import near_far_attention
from latte_convert.measuring.flops import measured_flops

assert interpreted(), "run test_triton.py"
HEADS = 2
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def inference() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def tokens(queries: int, keys: int, width: int, value_width: int, dtype: torch.dtype, batch: int = 2) -> list[Tensor]:
    """Query, key and value as views of ``(B, N, H, d)`` projections; queries have a mean, as in real models."""
    sizes = [(queries, width), (keys, width), (keys, value_width)]
    query, key, value = (torch.randn(batch, n, HEADS, d).transpose(1, 2) for n, d in sizes)
    return [x.to(dtype) for x in (query + 1, key, value)]


def some_mask(keys: int) -> Tensor:
    """The first sample sees no key, the second about 60 %."""
    mask = torch.rand(2, keys) > 0.4
    mask[0] = False
    return mask


def served(*qkv: Tensor) -> None:
    assert runs_in_triton(AttentionCall(*qkv, scale=1.0))


def served_by(kernel: Kernel, call: AttentionCall) -> bool:
    return runs_in_triton(call, *kernel.parameters()) and not kernel.is_softmax(call.shape)


def is_near(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected.to(actual.dtype), TOLERANCE[actual.dtype])


# --- latte ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "value_width", "dtype"),
    [
        (70, 70, 20, 7, torch.float32),
        (70, 70, 20, 7, torch.bfloat16),
        (3, 69, 80, 72, torch.float16),
        (67, 3, 16, 16, torch.float32),
    ],
)
def test_latte_is_its_definition(
    queries: int, keys: int, width: int, value_width: int, causal: bool, dtype: torch.dtype
) -> None:
    qkv, mask = tokens(queries, keys, width, value_width, dtype), some_mask(keys)
    served(*qkv)
    names = ("alpha", "delta_q", "delta_k", "beta_q", "beta_k")
    scalars = {name: torch.rand(HEADS) for name in names}
    expected = attend_exactly(latte_reference, qkv, scale=0.3, mask=mask, causal=causal, **scalars)
    sigma = torch.rand(HEADS * value_width)
    actual = attend(latte_attention, *qkv, scale=0.3, mask=mask, causal=causal, sigma=sigma, **scalars)
    is_near(actual, expected * sigma.reshape(HEADS, 1, -1))


def attend_exactly(operator: Any, qkv: list[Tensor], **settings: Any) -> Tensor:
    """A definition in float64, so that what differs is the kernel's own rounding."""
    return operator(*(x.double() for x in qkv), **settings)


@pytest.mark.parametrize("options", [{"jpn": False}, {"tte": False}])
@pytest.mark.parametrize("causal", [False, True])
def test_latte_without_a_mask_takes_its_sums_in_chunks(options: dict[str, bool], causal: bool) -> None:
    qkv, ones = tokens(300, 301, 8, 8, torch.float32, batch=1), {n: torch.ones(1) for n in ("delta_q", "delta_k")}
    settings = {"alpha": -torch.ones(1), **ones, "beta_q": torch.ones(1), "beta_k": torch.ones(1), **options}
    expected = attend_exactly(latte_reference, qkv, scale=0.3, causal=causal, **settings)
    is_near(attend(latte_attention, *qkv, scale=0.3, causal=causal, **settings), expected)


def test_nothing_leaks_from_a_later_key_or_a_masked_one() -> None:
    kernel = built("latte", 16, granularity="head")
    query, key, value = tokens(70, 70, 16, 16, torch.float32)
    before = kernel(AttentionCall(query, key, value, 0.25, causal=True))
    key[:, :, 40:], value[:, :, 40:] = 50.0, -50.0
    after = kernel(AttentionCall(query, key, value, 0.25, causal=True))
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])
    key[:, :, 40:], value[:, :, 40:] = float("nan"), float("nan")
    seen = torch.ones(2, 70, dtype=torch.bool)
    seen[:, 40:] = False
    settings = {name: torch.ones(1) for name in ("alpha", "delta_q", "delta_k", "beta_q", "beta_k")}
    hidden = attend(latte_attention, query, key, value, scale=0.25, mask=seen, **settings)
    assert hidden.isfinite().all()
    shown = attend(latte_attention, query, key[:, :, :40], value[:, :, :40], scale=0.25, **settings)
    is_near(hidden, shown)


# --- near_far ---

CASES: list[dict[str, Any]] = [
    {"grid": (6, 6), "prefix": 1, "window": 2, "halo": 1, "clusters": 9, "steps": 1},
    {"grid": (5, 7), "prefix": 3, "window": 3, "halo": 1, "clusters": 6, "steps": 2},
    {"grid": (11, 10), "prefix": 0, "window": 10, "halo": 1, "clusters": 66, "steps": 1},
    {"grid": None, "prefix": 2, "window": 2, "halo": 1, "clusters": 7, "steps": 1},
    {"grid": (6, 5), "prefix": 1, "window": 0, "halo": 0, "clusters": 5, "steps": 0},
]


@pytest.mark.parametrize(
    ("case", "masked", "dtype"),
    [
        *((case, True, torch.float32) for case in CASES),
        (CASES[0], False, torch.float32),
        (CASES[0], False, torch.float16),
        (CASES[1], True, torch.bfloat16),
    ],
)
def test_near_far_is_its_definition(case: dict[str, Any], masked: bool, dtype: torch.dtype) -> None:
    grid, prefix = case["grid"], case["prefix"]
    count = 37 if grid is None else grid[0] * grid[1]
    query, key, value = tokens(count, prefix + count, 20, 12, dtype)
    served(query, key, value)
    mask = some_mask(prefix + count) if masked else None
    actual = near_far_attention(query, key, value, scale=0.3, mask=mask, **case)
    near_far = {name: case[name] for name in ("grid", "prefix", "window", "halo")}
    clusters = {
        "grid": grid,
        "cells": cell_counts(grid or (count, 1), case["clusters"]),
        "channels": assignment_channels(20),
        "steps": case["steps"],
    }
    exact = [x.double() for x in (query, key, value)]
    seen = None if mask is None else mask[:, prefix:]
    assign = assign_reference(exact[0], exact[1][:, :, prefix:], scale=0.3, mask=seen, **clusters)
    is_near(actual, near_far_reference(*exact, scale=0.3, assign=assign, mask=mask, **near_far))


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, False), (torch.bfloat16, True)])
def test_near_far_samples_many_tokens_and_sums_them_in_parts(masked: bool, dtype: torch.dtype) -> None:
    qkv = tokens(33 * 34, 1 + 33 * 34, 16, 16, dtype)
    mask = some_mask(1 + 33 * 34) if masked else None
    settings = {"scale": 0.25, "prefix": 1, "grid": (33, 34), "window": 8, "halo": 0, "clusters": 40, "mask": mask}
    expected = near_far_attention(*(x.double() for x in qkv), **settings)
    is_near(near_far_attention(*qkv, **settings), expected)


def test_near_far_across_towers_has_no_regions() -> None:
    qkv = tokens(70, 36, 16, 16, torch.float32)
    settings = {"scale": 0.25, "grid": (6, 6), "aligned": False, "clusters": 9}
    expected = near_far_attention(*(x.double() for x in qkv), **settings)
    is_near(near_far_attention(*qkv, **settings), expected)


# --- what surrounds them ---


def built(name: str, width: int, **options: Any) -> Kernel:
    kernel = get_kernel(name)(HEADS, width, **options)
    for parameter in kernel.parameters():
        parameter.add_(0.1 * torch.rand_like(parameter))
    return kernel


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("latte", {"exact_prefix": True, "sigma": True, "key_shift": True}),
        ("near_far", {"window": 3, "halo": 0, "clusters": 6}),
    ],
)
def test_a_kernel_with_a_prefix_and_padding_is_the_same_in_pytorch(name: str, options: dict[str, Any]) -> None:
    kernel = built(name, 16, **options)
    qkv = tokens(2 + 63, 2 + 63, 16, 16, torch.float32)
    mask = torch.ones(2, 2 + 63, dtype=torch.bool)
    mask[1, 2 + 45 :] = False
    layout = TokenLayout(prefix=2, grid=(7, 9))
    call = AttentionCall(*qkv, 0.25, mask, layout=layout)
    assert served_by(kernel, call)
    actual = kernel(call)
    expected = kernel(AttentionCall(*(x.double() for x in qkv), 0.25, mask, layout=layout))
    is_near(actual, expected)


@pytest.mark.parametrize(("name", "options"), [("latte", {}), ("near_far", {"window": 2, "halo": 0, "clusters": 6})])
def test_compilers_counters_and_gradients_get_pytorch(name: str, options: dict[str, Any]) -> None:
    kernel = built(name, 16, **options)
    qkv = tokens(64, 64, 16, 16, torch.float32)
    call = AttentionCall(*qkv, 0.25, layout=TokenLayout(grid=(8, 8)))
    assert served_by(kernel, call)
    # Batches are not in the formula, and of sums it counts what are no matmuls, too.
    assert 0.9 < measured_flops(lambda: kernel(call))[0] / (2 * kernel.flops(call.shape)) < 1.1
    expected = kernel(AttentionCall(*(x.double() for x in qkv), 0.25, layout=call.layout))
    is_near(torch.compile(kernel, backend="eager")(call), expected)
    with torch.enable_grad():
        leaf = qkv[0].requires_grad_()
        out = kernel(AttentionCall(leaf, *qkv[1:], 0.25, layout=call.layout))
        assert torch.autograd.grad(out.sum(), leaf)[0].isfinite().all()
    is_near(out.detach(), expected)


def test_what_the_kernels_do_not_hold_gets_pytorch() -> None:
    narrow = tokens(4, 4, 16, 16, torch.float32)
    served(*narrow)
    for others in (
        tokens(4, 4, 16, 16, torch.float64),
        tokens(4, 4, 129, 16, torch.float32),
        [narrow[0].half(), *narrow[1:]],
    ):
        assert not runs_in_triton(AttentionCall(*others, scale=1.0))
    with torch.enable_grad():
        assert not runs_in_triton(AttentionCall(*narrow, scale=1.0), torch.ones(1, requires_grad=True))
