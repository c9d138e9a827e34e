"""What the adapter tests do with models: route sites to kernels, and compare outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert.adapters.hf import HFAdapter
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, Handler
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.latte.kernel import LatteKernel

ADAPTER = HFAdapter()


def eligible(model: nn.Module) -> list[str]:
    return [site.name for site in Host.of(model).sites() if site.eligible]


class Exact:
    """Handler that computes softmax attention from what the call says, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        assert call.obstacle is None
        self.calls += 1
        kernel = ExactKernel(call.query.shape[1], call.query.shape[3])
        return kernel(call)


def exact_handlers(sites: Iterable[str]) -> dict[str, Handler]:
    return {name: Exact() for name in sites}


def latte_kernels(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, LatteKernel]:
    """A kernel per site, with parameters that are not the neutral ones."""
    sites = {site.name: site for site in Host.of(model).sites() if site.eligible}
    kernels = {}
    for name in sites if names is None else names:
        kernel = LatteKernel(sites[name].heads, sites[name].head_dim, granularity="head", sigma=True)
        with torch.no_grad():
            kernel.alpha.copy_(torch.linspace(-0.5, 0.5, kernel.heads))
            kernel.sigma.copy_(torch.linspace(0.8, 1.2, kernel.sigma.numel()))  # type: ignore[union-attr]
        kernels[name] = kernel
    return kernels


def tensors(output: Any, prefix: str = "") -> dict[str, Tensor | None]:
    """All tensors in an output, by path; None leaves (an absent attention map) are kept."""
    if output is None or isinstance(output, Tensor):
        return {prefix: output}
    if isinstance(output, tuple | list):
        items: Iterable[tuple[Any, Any]] = enumerate(output)
    elif hasattr(output, "items"):
        items = output.items()
    else:
        return {}
    if hasattr(output, "items"):
        items = output.items()
    return {path: leaf for key, value in items for path, leaf in tensors(value, f"{prefix}/{key}").items()}


def valid(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values at tokens that are not padding, where ``values`` has a token dimension like the mask's."""
    if mask is None or values.dim() < 3 or values.shape[:2] != mask.shape:
        return values
    return values[mask.bool()]


def assert_same(actual: Any, expected: Any, mask: Tensor | None = None, *, tolerance: float = 1e-5) -> None:
    """Same structure, and the same values at valid tokens."""
    assert type(actual) is type(expected)
    left, right = tensors(actual), tensors(expected)
    assert list(left) == list(right)
    compared = 0
    for path, value in right.items():
        other = left[path]
        if value is None or other is None:
            assert value is other, path
            continue
        torch.testing.assert_close(
            valid(other, mask),
            valid(value, mask),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda message, path=path: f"{path}: {message}",
        )
        compared += 1
    assert compared
