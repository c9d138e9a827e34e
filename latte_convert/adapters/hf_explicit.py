"""The two attentions of Transformers that go through no interface and are read all the same.

Table Transformer's multiplies, masks and normalises by hand, WavLM's hands its own matrices to a function of PyTorch,
so there is no call to hand over. While a module is routed, a stand-in projects as the class does, hands query, key and
value to a handler, and projects back: for Table Transformer in the place of ``forward``, for WavLM in the place of the
method that it attends with, as everything before that (its gated bias of relative positions) can run as it is. Where
the handler leaves a call to the original, the class's own code runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert import compat
from latte_convert.adapters.calls import attention_call
from latte_convert.adapters.route import Route, StandIn, replaced_forward

_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")
_SETTINGS = ("num_heads", "head_dim", "scaling", "dropout")
# All that a forward takes: a version that takes more may compute something else.
_TABLE = {
    "self", "hidden_states", "attention_mask", "object_queries", "key_value_states", "spatial_position_embeddings",
    "output_attentions",
}  # fmt: skip
_WAVLM = {"self", "hidden_states", "attention_mask", "position_bias", "index", "kwargs"}
_ATTENDS = "torch_multi_head_self_attention"
"""The method of WavLM's class."""
_collector = compat.OUTPUTS_ASKED_FOR.get()


def is_explicit(module: nn.Module) -> bool:
    """Whether a module is of a class, and of a version, that is read here."""
    arguments = {name: arguments for name, (arguments, _) in _READ.items()}.get(type(module).__name__)
    return (
        arguments is not None
        and all(isinstance(getattr(module, name, None), nn.Module) for name in _LAYERS)
        and all(isinstance(getattr(module, name, None), int | float) for name in _SETTINGS)
        and set(inspect.signature(type(module).forward).parameters) == arguments
        and replaced_forward(module) is None
    )


def stand_in_of(module: nn.Module) -> StandIn:
    """What makes the forward of a module that ``is_explicit``, with its attention handed over."""
    return _READ[type(module).__name__][1]


def weights_asked_for(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model wants attention weights: layers are told so, or only the model's hooks are."""
    if kwargs.get("output_attentions") or _collector is None or torch.compiler.is_compiling():
        return bool(kwargs.get("output_attentions"))
    return any("attentions" in name for name in _collector.get() or ())


class _Table:
    """In place of ``TableTransformerAttention.forward`` of one module: same arguments and results.

    ``output_attentions`` gets the exact attention weights, behind a handler that computes too.
    """

    def __init__(self, module: Any, route: Route, original: Callable[..., Any]) -> None:
        self.module = module
        self.route = route
        self.original = original

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        object_queries: Tensor | None = None,
        key_value_states: Tensor | None = None,
        spatial_position_embeddings: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        positioned = _plus(hidden_states, object_queries)
        if key_value_states is None:
            keys, values = positioned, hidden_states
        else:
            keys, values = _plus(key_value_states, spatial_position_embeddings), key_value_states
        projected = module.q_proj(positioned), module.k_proj(keys), module.v_proj(values)
        query, key, value = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in projected)
        output = self._ask(query, key, value, attention_mask)
        weights = None
        if output is None or output_attentions:
            original, weights = self.original(
                module, hidden_states, attention_mask, object_queries, key_value_states, spatial_position_embeddings,
                output_attentions,
            )  # fmt: skip
            if output is None:
                return original, weights
        return module.out_proj(output.transpose(1, 2).flatten(2)), weights

    def _ask(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor | None:
        """Have the latest handler compute ``(B, H, Nq, d)``; in a boolean mask of this class, True ignores."""
        scale, dropout = float(self.module.scaling), float(self.module.dropout) if self.module.training else 0.0

        def exact() -> Tensor:
            logits = (query * scale) @ key.transpose(-1, -2)
            if mask is not None:
                logits = logits.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
            return F.dropout(logits.softmax(-1), dropout) @ value

        attends = ~mask if mask is not None and mask.dtype == torch.bool else mask
        call = attention_call(
            self.module, self.route.layout, query, key, value, exact, scale=scale, masks=[attends], dropout=dropout
        )
        return self.route.ask(call)


class _WavLM:
    """In place of ``WavLMAttention.forward`` of one module: the same code, on a module that attends otherwise."""

    def __init__(self, module: Any, route: Route, original: Callable[..., Any]) -> None:
        self.module = module
        self.route = route
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def attend(hidden_states: Tensor, attention_mask: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor | None]:
            output = self._ask(hidden_states, attention_mask, bias)
            if output is None or weights_asked_for(kwargs):
                original, weights = getattr(self.module, _ATTENDS)(hidden_states, attention_mask, bias)
                if output is None:
                    return original, weights
            else:
                weights = None
            return self.module.out_proj(output.transpose(1, 2).flatten(2)), weights

        return self.original(_Otherwise(self.module, {_ATTENDS: attend}), *args, **kwargs)

    def _ask(self, hidden_states: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor | None:
        """Have the latest handler compute ``(B, H, N, d)``; ``bias`` is ``(B·H, N, N)``."""
        module = self.module
        projected = (layer(hidden_states) for layer in (module.q_proj, module.k_proj, module.v_proj))
        query, key, value = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in projected)
        bias = bias.reshape(-1, module.num_heads, *bias.shape[1:])
        seen = None if mask is None else mask.eq(1)
        dropout = float(module.dropout) if module.training else 0.0

        def exact() -> Tensor:
            added = bias if seen is None else bias.masked_fill(~seen[:, None, None], float("-inf"))
            return F.scaled_dot_product_attention(query, key, value, added, dropout)

        call = attention_call(
            module, self.route.layout, query, key, value, exact, masks=[seen], bias=bias, dropout=dropout
        )
        return self.route.ask(call)


class _Otherwise:
    """A module with some of its methods replaced, for code that takes it as ``self``."""

    def __init__(self, module: nn.Module, methods: dict[str, Any]) -> None:
        self._module = module
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._methods[name] if name in self._methods else getattr(self._module, name)


def _plus(tokens: Tensor, positions: Tensor | None) -> Tensor:
    return tokens if positions is None else tokens + positions


_READ: dict[str, tuple[set[str], StandIn]] = {
    "TableTransformerAttention": (_TABLE, _Table),
    "WavLMAttention": (_WAVLM, _WavLM),
}
