"""The one attention of Transformers that writes out its softmax and is read all the same: Table Transformer's.

``TableTransformerAttention`` multiplies, masks and normalises by hand, so there is no call to hand over. While a
module is routed, the stand-in for its ``forward`` projects as the class does, hands query, key and value to a handler,
and projects back. Where the handler leaves a call to the original, the class's own forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.adapters.calls import attention_call
from latte_convert.adapters.route import Route, replaced_forward

_CLASS = "TableTransformerAttention"
_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")
_SETTINGS = ("num_heads", "head_dim", "scaling", "dropout")
# All that its forward takes: a version that takes more may compute something else.
_ARGUMENTS = {
    "self", "hidden_states", "attention_mask", "object_queries", "key_value_states", "spatial_position_embeddings",
    "output_attentions",
}  # fmt: skip


def is_explicit(module: nn.Module) -> bool:
    """Whether a module is of the class, and of a version, that is read here."""
    return (
        type(module).__name__ == _CLASS
        and all(isinstance(getattr(module, name, None), nn.Module) for name in _LAYERS)
        and all(isinstance(getattr(module, name, None), int | float) for name in _SETTINGS)
        and set(inspect.signature(type(module).forward).parameters) == _ARGUMENTS
        and replaced_forward(module) is None
    )


def stand_in(module: nn.Module, route: Route, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that ``is_explicit`` with its attention handed over."""
    return _Attention(module, route, original)


class _Attention:
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


def _plus(tokens: Tensor, positions: Tensor | None) -> Tensor:
    return tokens if positions is None else tokens + positions
