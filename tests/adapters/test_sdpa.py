"""Taking over ``F.scaled_dot_product_attention`` of one module, however its file spells it."""

from __future__ import annotations

import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as functional_of_torch
from helpers import Exact
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from latte_convert.adapters.layout import MapSize, SiteLayout
from latte_convert.adapters.route import route
from latte_convert.adapters.sdpa import calls_sdpa, stand_in, with_globals
from latte_convert.attention import AttentionCall, TokenLayout


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = 1.0
        self.switch = False


class ByF(Base):
    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        return self.offset + F.scaled_dot_product_attention(q, q, q, **kwargs)


class ByTorch(Base):
    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        return self.offset + torch.nn.functional.scaled_dot_product_attention(q, q, q, **kwargs)


class ByNN(Base):
    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        return self.offset + nn.functional.scaled_dot_product_attention(q, q, q, **kwargs)


class ByAlias(Base):
    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        return self.offset + functional_of_torch.scaled_dot_product_attention(q, q, q, **kwargs)


class ByName(Base):
    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        return self.offset + scaled_dot_product_attention(q, q, q, **kwargs)


class Decorated(Base):
    @torch.no_grad()
    def forward(self, q: Tensor, **kwargs: Any) -> Tensor:
        return self.offset + F.scaled_dot_product_attention(q, q, q, **kwargs)


class Plain(Base):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **kwargs)


class Unrelated(Base):
    def forward(self, q: Tensor) -> Tensor:
        return q


SPELLINGS = [ByF, ByTorch, ByNN, ByAlias, ByName, Decorated]


def _map(height: int, width: int) -> MapSize:
    seen = MapSize()
    seen.note((height, width))
    return seen


def zeros(call: AttentionCall) -> Tensor:
    return torch.zeros_like(call.query)


class Constant:
    """A handler that can be pickled."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, call: AttentionCall) -> Tensor:
        return torch.full_like(call.query, self.value)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_spelling_is_found_and_only_one_module_is_taken(kind: type[Base]) -> None:
    routed, other = kind(), kind()
    q = torch.randn(2, 3, 5, 4)
    expected = routed(q)
    undo = route(routed, zeros, stand_in)
    assert calls_sdpa(kind)
    assert torch.equal(routed(q), torch.ones_like(q))
    assert torch.equal(other(q), expected)
    undo()
    assert torch.equal(routed(q), expected)
    assert type(routed) is kind


def test_what_does_not_call_it_is_told() -> None:
    assert not calls_sdpa(Unrelated)
    assert not calls_sdpa(nn.Linear)


def test_the_latest_route_computes_and_undo_has_no_order() -> None:
    module, q = ByF(), torch.randn(1, 1, 3, 4)
    first, second = route(module, Constant(1.0), stand_in), route(module, Constant(2.0), stand_in)
    assert float(module(q).max()) == 3.0
    first()
    first()
    assert float(module(q).max()) == 3.0
    third = route(module, Constant(3.0), stand_in)
    second()
    assert float(module(q).max()) == 4.0
    third()
    assert type(module) is ByF


def test_attributes_hold_while_routed() -> None:
    module = ByF()
    undo = [route(module, zeros, stand_in, attributes={"switch": True}) for _ in range(2)]
    assert module.switch
    undo[0]()
    assert module.switch
    undo[1]()
    assert not module.switch


def test_arguments_reach_the_handler() -> None:
    module, q = ByF(), torch.randn(2, 3, 12, 4)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[1, ..., 9:] = False
    seen: list[AttentionCall] = []
    expected = module(q, attn_mask=mask, scale=0.25)
    undo = route(module, seen.append, stand_in, layout=SiteLayout(prefix=3, maps=(_map(4, 2), _map(9, 1))))
    assert torch.equal(module(q, attn_mask=mask, scale=0.25), expected)
    undo()
    (call,) = seen
    assert call.module is module
    assert (call.scale, call.causal, call.dropout, call.obstacle) == (0.25, False, 0.0, None)
    assert call.mask is not None
    assert call.mask.sum(1).tolist() == [12, 9]
    assert call.layout == TokenLayout(3, (9, 1), aligned=True)
    torch.testing.assert_close(call.exact() + 1, expected)


@pytest.mark.parametrize(
    ("shapes", "kwargs", "obstacle"),
    [
        ([(1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)], {"enable_gqa": True, "is_causal": True}, "causal grouped-query"),
        ([(1, 2, 3, 5, 8)] * 3, {}, "attention inside blocks of tokens"),
        ([(1, 2, 5, 8)] * 3, {"attn_mask": torch.randn(5, 5)}, "carries a bias"),
        ([(1, 2, 5, 8)] * 3, {"attn_mask": torch.eye(5, dtype=torch.bool)}, "is not key padding"),
    ],
)
def test_obstacles(shapes: list[tuple[int, ...]], kwargs: dict[str, Any], obstacle: str) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    seen: list[AttentionCall] = []
    module = Plain()
    route(module, seen.append, stand_in)
    assert torch.equal(module(*tensors, **kwargs), scaled_dot_product_attention(*tensors, **kwargs))
    assert obstacle in str(seen[0].obstacle)


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_that_share_keys_get_them_each(heads: int) -> None:
    query, (key, value) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, heads, 7, 8)
    module, seen = Plain(), list[AttentionCall]()
    route(module, seen.append, stand_in)
    expected = module(query, key, value, enable_gqa=True)
    assert seen[0].obstacle is None
    torch.testing.assert_close(Exact()(seen[0]), expected, rtol=1e-5, atol=1e-6)


def test_a_bias_that_is_expected_comes_with_the_call() -> None:
    tokens, bias = torch.randn(3, 2, 2, 5, 8), torch.randn(2, 5, 5)
    module, seen = Plain(), list[AttentionCall]()
    route(module, seen.append, stand_in, biased=True)
    expected = module(*tokens, attn_mask=bias)
    assert torch.equal(seen[0].bias, bias[None])
    torch.testing.assert_close(Exact()(seen[0]), expected, rtol=1e-5, atol=1e-6)


def test_a_causal_site_reads_its_triangle_as_causality() -> None:
    q = torch.randn(1, 2, 6, 4)
    triangle = torch.full((6, 6), float("-inf")).triu(1)
    seen: list[AttentionCall] = []
    for causal in (True, False):
        module = ByF()
        route(module, seen.append, stand_in, causal=causal)
        module(q, attn_mask=triangle)
    assert (seen[0].causal, seen[0].obstacle) == (True, None)
    assert "is not key padding" in str(seen[1].obstacle)


def test_a_pickled_module_stays_routed() -> None:
    module, q = ByTorch(), torch.randn(1, 1, 3, 4)
    undo = route(module, Constant(2.0), stand_in)
    twin = pickle.loads(pickle.dumps(module))
    undo()
    assert float(twin(q).min()) == 3.0


def test_with_globals_keeps_defaults_and_closure() -> None:
    bound = 5

    def function(a: int, b: int = 2, *, c: int = 3) -> tuple[Any, ...]:
        return a, b, c, bound, F

    stand_in = types.ModuleType("stand_in")
    assert with_globals(function, {"F": stand_in})(1) == (1, 2, 3, 5, stand_in)
    assert function(1)[-1] is F
