"""Attention modules that call ``F.scaled_dot_product_attention`` themselves (timm, open_clip, torchvision).

Their forward is not copied: the very same code runs with other globals, in which ``F`` (or ``torch``, for
``torch.nn.functional``) is a stand-in whose ``scaled_dot_product_attention`` asks the module's route. So whatever a
library version does before and after the attention (QK-norm, rotary embedding, gates) stays exactly what it is.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from latte_convert.adapters.calls import attention_call
from latte_convert.adapters.route import Route, replaced_forward

BY_HAND = "computes attention itself instead of through scaled_dot_product_attention"
_SDPA = "scaled_dot_product_attention"


class Arguments(NamedTuple):
    """What ``F.scaled_dot_product_attention`` takes: built from the arguments of a call of it."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def given_to(self, attend: Callable[..., Tensor]) -> Tensor:
        """What it, or what goes by the same name elsewhere, computes of them."""
        *tensors, scale, enable_gqa = self
        return attend(*tensors, scale=scale, enable_gqa=enable_gqa)


def calls_sdpa(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class calls ``F.scaled_dot_product_attention`` by that name."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and _SDPA in code.co_names


def obstacle(module: nn.Module) -> str | None:
    """Why the attention of a module cannot be handed over, or None."""
    return replaced_forward(module) if calls_sdpa(type(module)) else BY_HAND


def stand_in(module: nn.Module, route: Route, original: Any) -> Callable[..., Any]:
    """The forward of a module whose class ``calls_sdpa``, with its attention handed over."""
    return MethodType(_hand_over(inspect.unwrap(original), _Attention(module, route)), module)


class _Attention:
    """In place of ``F.scaled_dot_product_attention`` in one module: same arguments, same result shape."""

    def __init__(self, module: nn.Module, route: Route) -> None:
        self.module = module
        self.route = route

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = Arguments(*args, **kwargs)
        exact = partial(given.given_to, nn.functional.scaled_dot_product_attention)
        call = attention_call(
            self.module, self.route.layout, *given[:3], exact, scale=given.scale, masks=[_four(given.attn_mask)],
            causal=given.is_causal, triangle=self.route.causal, biased=self.route.biased, dropout=given.dropout_p,
        )  # fmt: skip
        output = self.route.ask(call)
        return exact() if output is None else output


def _hand_over(function: types.FunctionType, attend: Callable[..., Tensor]) -> types.FunctionType:
    """The same code, whose calls of ``F.scaled_dot_product_attention`` are calls of ``attend``."""
    functional = _copy_with(nn.functional, **{_SDPA: attend})
    stand_ins: list[tuple[Any, Any]] = [(getattr(nn.functional, _SDPA), attend), (nn.functional, functional)]
    if "functional" in function.__code__.co_names:  # spelled out, from torch or torch.nn
        stand_ins += [(nn, _copy_with(nn, functional=functional))]
        stand_ins += [(torch, _copy_with(torch, nn=stand_ins[-1][1]))]
    replacements = {
        name: new for name in function.__code__.co_names for old, new in stand_ins
        if function.__globals__.get(name) is old
    }  # fmt: skip
    return with_globals(function, replacements)


def _copy_with(module: types.ModuleType, **replacements: Any) -> types.ModuleType:
    """A copy of a module with some of its names replaced."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({**vars(module), **replacements})
    return copy


def with_globals(function: types.FunctionType, replacements: dict[str, Any]) -> types.FunctionType:
    """The same code with some of its globals replaced."""
    rebuilt = types.FunctionType(
        # A code object of its own: torch.compile keeps what it compiled by code object, under names in the globals.
        function.__code__.replace(),
        {**function.__globals__, **replacements},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


def _four(mask: Tensor | None) -> Tensor | None:
    """A mask in four dimensions, as SDPA would broadcast it."""
    if mask is None:
        return None
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask
