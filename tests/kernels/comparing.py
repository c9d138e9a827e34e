"""What the tests of single kernels share: inputs as callers give them, comparisons, and a probe of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from latte_convert.attention import AttentionCall

HEADS, DIM, VALUE_DIM = 3, 8, 7
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attend(operator: Callable[..., Tensor], *qkv: Tensor, **settings: Any) -> Tensor:
    """A kernel, or a function of a call and settings of its own, on plain tensors, as the references take them."""
    names = [name for name in ("scale", "mask", "causal", "layout") if name in settings]
    described = {name: value for name in names if (value := settings.pop(name)) is not None}
    return operator(AttentionCall(*qkv, **described), **settings)


def tokens(queries: int, keys: int, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value in the layout of real callers: views of ``(B, N, H, d)`` projections."""
    sizes = [(queries, DIM), (keys, DIM), (keys, VALUE_DIM)]
    return [torch.randn(batch, n, HEADS, d).transpose(1, 2).to(dtype) for n, d in sizes]


def some_mask(keys: int) -> Tensor:
    """Two rows of random keys: the first of them sees none at all, the second both ends: there is no padding."""
    seen = torch.rand(keys) > 0.4
    seen[:5] = seen[-1] = True
    return torch.stack([torch.zeros(keys, dtype=torch.bool), seen])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_grads_close(actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], tolerance: float) -> None:
    """Compare what a random weighting of two outputs sends back to the leaves that both came from."""
    weight = torch.randn_like(expected)
    got = torch.autograd.grad((actual * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(got, wanted, strict=True):
        # A parameter's gradient sums over all tokens, and one past a small divisor is large: measure against its size.
        size = max(1.0, other.abs().max().item())
        assert_close(one / size, other / size, tolerance)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns, but for views of those given."""

    numel = 0

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                # What is allocated: an expanded view has no elements of its own.
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out
