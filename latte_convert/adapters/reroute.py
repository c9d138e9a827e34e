"""Take over attention modules that call ``F.scaled_dot_product_attention`` themselves (timm, open_clip, PyTorch).

Their forward is neither copied nor replaced: the very same code object runs with other globals, in which ``F`` (or
``torch``, for ``torch.nn.functional``) is a stand-in whose ``scaled_dot_product_attention`` hands the call to a
handler. So whatever a library version does before and after the attention (QK-norm, rotary embedding, gates) stays
exactly what it is.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert.adapters.layout import SiteLayout
from latte_convert.adapters.masks import key_mask
from latte_convert.attention import AttentionCall, Handler

_SDPA = "scaled_dot_product_attention"


def calls_sdpa(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class calls ``F.scaled_dot_product_attention`` by that name."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and _SDPA in code.co_names


class Rerouted:
    """Stands in for the ``forward`` of one module; the latest handler computes its attention.

    A plain object rather than a closure, so that a converted model can be copied and pickled.

    Attributes:
        module: The module.
        causal: Whether the site is causal where the call does not say.
        layout: How its tokens lie on an image.
        handlers: By order of routing; the latest one computes.
        replaced: The module's own values of the attributes that it has otherwise while it is routed.
    """

    def __init__(self, module: nn.Module, *, causal: bool = False, layout: SiteLayout | None = None) -> None:
        self.module = module
        self.causal = causal
        self.layout = layout or SiteLayout()
        self.handlers: dict[int, Handler] = {}
        self.replaced: dict[str, Any] = {}
        self.routed = 0
        self._function = self._rebuild()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._function = self._rebuild()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's own forward with attention handed over."""
        return self._function(self.module, *args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """In place of ``F.scaled_dot_product_attention``: same arguments, same result shape."""

        def exact() -> Tensor:
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        obstacle = _unlike_heads(query, key, value)
        causal, mask = is_causal or (self.causal and attn_mask is not None and query.shape[2] > 1), None
        try:
            mask = key_mask(_four(attn_mask), queries=query.shape[2], keys=key.shape[2], causal=causal)
        except ValueError as error:
            obstacle = obstacle or str(error)
        call = AttentionCall(
            module=self.module,
            query=query,
            key=key,
            value=value,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=None if mask is None else mask.expand(key.shape[0], -1),
            causal=causal,
            layout=self.layout.of(query.shape[2], key.shape[2]),
            exact=exact,
            obstacle=obstacle,
            dropout=dropout_p,
        )
        output = self.handlers[max(self.handlers)](call)
        return exact() if output is None else output

    def _rebuild(self) -> Callable[..., Any]:
        function = inspect.unwrap(type(self.module).forward)
        functional = _stand_in(nn.functional, **{_SDPA: self.attend})
        stand_ins: list[tuple[Any, Any]] = [(getattr(nn.functional, _SDPA), self.attend), (nn.functional, functional)]
        if "functional" in function.__code__.co_names:  # spelled out, from torch or torch.nn
            stand_ins += [(nn, _stand_in(nn, functional=functional))]
            stand_ins += [(torch, _stand_in(torch, nn=stand_ins[-1][1]))]
        replacements = {
            name: new for name in function.__code__.co_names for old, new in stand_ins
            if function.__globals__.get(name) is old
        }  # fmt: skip
        return with_globals(function, replacements)


def _stand_in(module: types.ModuleType, **replacements: Any) -> types.ModuleType:
    """A copy of a module with some of its names replaced."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({**vars(module), **replacements})
    return copy


def with_globals(function: types.FunctionType, replacements: dict[str, Any]) -> types.FunctionType:
    """The same code with some of its globals replaced."""
    rebuilt = types.FunctionType(
        function.__code__,
        {**function.__globals__, **replacements},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return rebuilt


def reroute(
    module: nn.Module,
    handler: Handler,
    *,
    causal: bool = False,
    layout: SiteLayout | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Callable[[], None]:
    """Send the attention of a module to ``handler``; routes nest, and can be undone in any order.

    Args:
        module: A module whose class ``calls_sdpa``.
        handler: Computes the attention output, or returns None for the original's.
        causal: Whether the site is causal where the call does not say.
        layout: How its tokens lie on an image; the first route's holds for all of them.
        attributes: Values that attributes of the module have while it is routed, such as the switch of a library
            between SDPA and arithmetic of its own.

    Returns:
        A function that takes this route away; with the last one the module is as it was.
    """
    rerouted = module.__dict__.get("forward")
    if not isinstance(rerouted, Rerouted):
        rerouted = Rerouted(module, causal=causal, layout=layout)
        rerouted.replaced = {name: module.__dict__[name] for name in attributes or {}}
        module.__dict__.update(attributes or {}, forward=rerouted)
    rerouted.routed += 1
    key = rerouted.routed
    rerouted.handlers[key] = handler

    def undo() -> None:
        if rerouted.handlers.pop(key, None) is not None and not rerouted.handlers:
            del module.__dict__["forward"]
            module.__dict__.update(rerouted.replaced)

    return undo


def _unlike_heads(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why a call is not ``(batch, heads, tokens, channels)`` of equal heads, or None."""
    if query.dim() != 4:
        return "attention inside blocks of tokens"
    if key.shape[1] != query.shape[1]:
        return "grouped-query attention"
    if value.shape[-1] != query.shape[-1]:
        return f"values have {value.shape[-1]} channels a head, queries {query.shape[-1]}"
    return None


def _four(mask: Tensor | None) -> Tensor | None:
    """A mask in four dimensions, as SDPA would broadcast it."""
    if mask is None:
        return None
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask
