"""Take over attention modules that call ``F.scaled_dot_product_attention`` themselves (timm, open_clip, PyTorch).

Their forward is neither copied nor replaced: the very same code object runs with other globals, in which ``F`` is a
stand-in whose ``scaled_dot_product_attention`` hands the call to a handler. So whatever a library version does before
and after the attention (QK-norm, rotary embedding, gates) stays exactly what it is.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from latte_convert.adapters.base import AttentionCall, Handler, TokenLayout
from latte_convert.adapters.masks import key_mask

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
        prefix: Number of leading tokens that are not on the grid.
        handlers: By order of routing; the latest one computes.
    """

    def __init__(self, module: nn.Module, *, causal: bool = False, prefix: int = 0) -> None:
        self.module = module
        self.causal = causal
        self.prefix = prefix
        self.handlers: dict[int, Handler] = {}
        self.routed = 0
        self._function: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's own forward with attention handed over."""
        if self._function is None:
            self._function = self._rebuild(inspect.unwrap(type(self.module).forward))
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

        obstacle = "grouped-query attention" if key.shape[1] != query.shape[1] else None
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
            layout=_layout(query.shape[2], self.prefix),
            exact=exact,
            obstacle=obstacle,
            dropout=dropout_p,
        )
        output = self.handlers[max(self.handlers)](call)
        return exact() if output is None else output

    def _rebuild(self, function: types.FunctionType) -> Callable[..., Any]:
        functional = types.ModuleType("torch.nn.functional")
        functional.__dict__.update({**vars(nn.functional), _SDPA: self.attend})
        return with_globals(function, {"F": functional})


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


def reroute(module: nn.Module, handler: Handler, *, causal: bool = False, prefix: int = 0) -> Callable[[], None]:
    """Send the attention of a module to ``handler``; routes nest, and can be undone in any order.

    Returns:
        A function that takes this route away; with the last one the module is as it was.
    """
    rerouted = module.__dict__.get("forward")
    if not isinstance(rerouted, Rerouted):
        rerouted = Rerouted(module, causal=causal, prefix=prefix)
        module.__dict__["forward"] = rerouted
    rerouted.routed += 1
    key = rerouted.routed
    rerouted.handlers[key] = handler

    def undo() -> None:
        if rerouted.handlers.pop(key, None) is not None and not rerouted.handlers:
            del module.__dict__["forward"]

    return undo


def _four(mask: Tensor | None) -> Tensor | None:
    """A mask in four dimensions, as SDPA would broadcast it."""
    if mask is None:
        return None
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask


def _layout(tokens: int, prefix: int) -> TokenLayout:
    side = int(max(tokens - prefix, 0) ** 0.5)
    return TokenLayout(prefix=prefix, grid=(side, side) if side and side * side == tokens - prefix else None)
