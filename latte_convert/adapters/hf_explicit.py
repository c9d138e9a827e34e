"""The one attention of Transformers that writes out its softmax and is read all the same: Table Transformer's.

``TableTransformerAttention`` multiplies, masks and normalises by hand, so there is no call to hand over. While a
module is routed, its ``forward`` is replaced by one that projects as the class does, hands query, key and value to a
handler, and projects back. Where the handler leaves a call to the original, the class's own forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.adapters.layout import SiteLayout
from latte_convert.adapters.masks import key_mask
from latte_convert.adapters.reroute import Rerouted, reroute
from latte_convert.attention import AttentionCall, Handler

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
        and isinstance(module.__dict__.get("forward"), Rerouted | NoneType)
    )


def route(module: nn.Module, handler: Handler, layout: SiteLayout) -> Callable[[], None]:
    """Send the calls of a module that ``is_explicit`` to ``handler``; routes nest, and undo in any order."""
    if not isinstance(module.__dict__.get("forward"), Rerouted):
        module.__dict__["forward"] = RoutedExplicit(module, layout=layout)
    return reroute(module, handler)


class RoutedExplicit(Rerouted):
    """Stands in for the ``forward`` of one ``TableTransformerAttention``; the latest handler computes its attention.

    A handler that computes leaves no attention weights: they are None, also where ``output_attentions`` asks for them.
    """

    def _rebuild(self) -> Callable[..., Any]:
        return self._forward

    def _forward(
        self,
        module: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        object_queries: Tensor | None = None,
        key_value_states: Tensor | None = None,
        spatial_position_embeddings: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Same arguments and results as the class's forward."""
        positioned = _plus(hidden_states, object_queries)
        if key_value_states is None:
            keys, values = positioned, hidden_states
        else:
            keys, values = _plus(key_value_states, spatial_position_embeddings), key_value_states
        projected = module.q_proj(positioned), module.k_proj(keys), module.v_proj(values)
        query, key, value = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in projected)
        output = self._handle(module, query, key, value, attention_mask)
        if output is None:
            original: tuple[Tensor, Tensor | None] = type(module).forward(
                module, hidden_states, attention_mask, object_queries, key_value_states, spatial_position_embeddings,
                output_attentions,
            )  # fmt: skip
            return original
        return module.out_proj(output.transpose(1, 2).flatten(2)), None

    def _handle(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor | None:
        """Have the latest handler compute ``(B, H, Nq, d)``; in a boolean mask of this class, True ignores."""
        scale, dropout = float(module.scaling), float(module.dropout) if module.training else 0.0

        def exact() -> Tensor:
            logits = (query * scale) @ key.transpose(-1, -2)
            if mask is not None:
                logits = logits.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
            return F.dropout(logits.softmax(-1), dropout) @ value

        obstacle, kept = None, None
        try:
            attends = ~mask if mask is not None and mask.dtype == torch.bool else mask
            kept = key_mask(attends, queries=query.shape[2], keys=key.shape[2], causal=False)
        except ValueError as error:
            obstacle = str(error)
        call = AttentionCall(
            module=module, query=query, key=key, value=value, scale=scale,
            mask=None if kept is None else kept.expand(len(key), -1), causal=False,
            layout=self.layout.of(query.shape[2], key.shape[2]), exact=exact, obstacle=obstacle, dropout=dropout,
        )  # fmt: skip
        return self.handlers[max(self.handlers)](call)


def _plus(tokens: Tensor, positions: Tensor | None) -> Tensor:
    return tokens if positions is None else tokens + positions
