"""``torch.nn.MultiheadAttention``, in any model.

The class hides its attention well: in eval mode fused kernels compute it, the encoder layers around it have fused
kernels of their own that never call it, and an encoder packs padded batches into nested tensors. While a module is
routed none of these is taken for it: the stand-in for its ``forward`` projects, hands query, key and value to a
handler, and projects back; and a hook keeps the encoder layer around it on the path that calls it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.adapters.calls import attention_call
from latte_convert.adapters.route import Route, replaced_forward, route_site
from latte_convert.attention import AttentionSite, Handler

_CROSS = re.compile(r"(^|[._])(multihead_attn|encoder_attn|cross_?attn|cross_?attention)")
_TOWERS = {"visual": "vision", "vision": "vision", "text": "text", "encoder": "encoder", "decoder": "decoder"}


class TorchAdapter:
    """Any model with ``torch.nn.MultiheadAttention`` modules in it.

    Args:
        grid: How its tokens lie, where a user says so; see ``Recipe``.
        prefix: See ``Recipe``.
    """

    name = "torch"

    def __init__(self, grid: tuple[int, ...] | None = None, prefix: int | None = None) -> None:
        self.grid, self.prefix = grid, prefix

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether ``model`` has attention modules of PyTorch's own class."""
        return any(isinstance(module, nn.MultiheadAttention) for name, module in model.named_modules() if name)

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree.

        ``causal`` is False for all of them: whether one is causal is up to each call's mask.
        """
        return [
            describe(name, module, tower=tower_of(name))
            for name, module in model.named_modules()
            if name and isinstance(module, nn.MultiheadAttention)
        ]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of one attention module to ``handler``; routes nest, and undo in any order."""
        module: nn.MultiheadAttention = model.get_submodule(site)  # type: ignore[assignment]
        tower = tower_of(site)
        cross = describe(site, module, tower=tower).kind == "cross"
        # Keys of a detector are its feature map; object queries and tokens of an unknown model are none.
        image = cross or tower in ("vision", "encoder") or self.grid is not None
        return route_site(model, site, handler, stand_in, image=image, cross=cross, prefix=self.prefix, grid=self.grid)

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The module's ``out_proj``."""
        projection: nn.Linear = model.get_submodule(site).out_proj  # type: ignore[assignment]
        return projection


def describe(
    name: str, module: nn.MultiheadAttention, *, tower: str, causal: bool = False, reason: str | None = None
) -> AttentionSite:
    """The site of one ``nn.MultiheadAttention``.

    Args:
        name: Dotted path of the module.
        module: The module.
        tower: The tower it is in.
        causal: Whether its calls are known to be causal.
        reason: Why it must stay exact, where the caller knows; else the module's own settings decide.
    """
    reason = reason or obstacle(module)
    alike = module.in_proj_weight is not None  # queries, keys and values of one width
    kind: Literal["self", "cross"] = "self" if alike and not _CROSS.search(name) else "cross"
    return AttentionSite(
        name=name, tower=tower, kind=kind, causal=causal, heads=module.num_heads, head_dim=module.head_dim,
        eligible=reason is None, reason=reason,
    )  # fmt: skip


def stand_in(module: nn.Module, route: Route, _original: Any) -> Callable[..., Any]:
    """The forward of one ``nn.MultiheadAttention`` with its attention handed over."""
    return _Attention(module, route)


class _Attention:
    """In place of ``nn.MultiheadAttention.forward`` of one module: same arguments and results.

    Behind a handler that computes, ``need_weights=True`` gets the exact attention weights. Where a call leaves it to
    the default, as most do that drop the weights, they are None: N² numbers would cost more than all of its attention.
    """

    def __init__(self, module: Any, route: Route) -> None:
        self.module: nn.MultiheadAttention = module
        self.route = route

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module = self.module
        if query.is_nested:
            return self._nested(query), None
        batched = query.dim() == 3
        q, k, v = (_split(x, module.num_heads) for x in _project(module, *_batch_first(module, query, key, value)))
        padding = key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None]
        output = self._ask(q, k, v, padding, attn_mask, is_causal)
        weights = None
        if output is None or need_weights:
            original, weights = nn.MultiheadAttention.forward(
                module, query, key, value, key_padding_mask, need_weights is not False, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
            if output is None:
                return original, weights
        output = F.linear(output.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
        if not batched:
            return output[0], weights
        return output if module.batch_first else output.transpose(0, 1), weights

    def _ask(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None, hint: bool
    ) -> Tensor | None:
        """Have the latest handler compute ``(B, H, Nq, d)``; the masks are those of the call, True ignores."""
        batch, _, queries, _ = query.shape
        dropout = self.module.dropout if self.module.training else 0.0
        padding = None if padding is None else padding[:, None, None]
        if mask is not None:
            mask = mask.reshape(batch, -1, queries, key.shape[2]) if mask.dim() == 3 else mask[None, None]

        def exact() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, _sum(padding, mask, query), dropout)

        call = attention_call(
            self.module, self.route.layout, query, key, value, exact, dropout=dropout,
            masks=[_true_attends(padding), _true_attends(mask)], triangle=hint or self.route.causal, either=True,
            biased=None,
            obstacle="is_causal is a hint about attn_mask, and there is none" if hint and mask is None else None,
        )  # fmt: skip
        return self.route.ask(call)

    def _nested(self, tokens: Tensor) -> Tensor:
        """Self-attention over sequences of unequal lengths, as ``nn.TransformerEncoder`` packs a padded batch."""
        lengths = [len(sequence) for sequence in tokens.unbind()]
        if not any(lengths):  # nothing but padding
            return tokens
        padded = tokens.to_padded_tensor(0.0)
        ignored = torch.arange(padded.shape[1], device=padded.device) >= padded.new_tensor(lengths)[:, None]
        output, _ = self(padded, padded, padded, key_padding_mask=ignored, need_weights=False)
        return torch.nested.as_nested_tensor([row[:length] for row, length in zip(output, lengths, strict=True)])


def obstacle(module: nn.MultiheadAttention) -> str | None:
    """Why a module must stay exact, or None."""
    if module.bias_k is not None or module.bias_v is not None:
        return "a learned extra key and value (add_bias_kv)"
    if module.add_zero_attn:
        return "an extra key and value of zeros (add_zero_attn)"
    if inspect.unwrap(type(module).forward) is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} has a forward of its own"
    return replaced_forward(module)


def tower_of(name: str) -> str:
    """The tower of a module, as far as its path tells; else ``model``."""
    parts = name.lower().split(".")
    found = (tower for part in parts for word, tower in _TOWERS.items() if word in part)
    return next(found, "model")


def _batch_first(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Inputs as ``(B, N, E)``; equal tensors stay the same object, so that they are projected at once."""
    turned: dict[int, Tensor] = {}
    for x in inputs:
        if id(x) not in turned:
            turned[id(x)] = x[None] if x.dim() == 2 else x if module.batch_first else x.transpose(0, 1)
    return [turned[id(x)] for x in inputs]


def _project(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    bias: Tensor | None = module.in_proj_bias
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    elif query is key and key is value:
        return F.linear(query, module.in_proj_weight, bias).chunk(3, dim=-1)
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    inputs = (query, key, value)
    return tuple(F.linear(x, weight, b) for x, weight, b in zip(inputs, weights, biases, strict=True))


def _split(tokens: Tensor, heads: int) -> Tensor:
    """``(B, N, H·d)`` to ``(B, H, N, d)``."""
    return tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2)


def _true_attends(mask: Tensor | None) -> Tensor | None:
    """PyTorch's boolean attention masks say what to ignore; additive ones stay as they are."""
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


def _sum(padding: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Both masks as one additive mask."""
    total: Tensor | None = None
    for part in (padding, mask):
        if part is None:
            continue
        if part.dtype == torch.bool:
            part = like.new_zeros(part.shape).masked_fill(part, float("-inf"))
        total = part if total is None else total + part
    return total
