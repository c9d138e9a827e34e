"""Transformers models: every attention module that dispatches through ``ALL_ATTENTION_FUNCTIONS``.

The dispatch reads the name of the implementation from the module's own ``config`` and hands the module over, so a
site is routed by giving that one module a copy of its config with our name in it. No forward is copied, the other
modules keep running the original code untouched, and the model's masks are built as before.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from latte_convert.adapters.base import AttentionCall, AttentionSite, Handler, TokenLayout
from latte_convert.adapters.masks import key_mask

IMPLEMENTATION = "latte"

# Keyword arguments of attention functions that do not change what is computed, or that are read by name below.
_HARMLESS = frozenset(
    {"cache_position", "output_attentions", "output_hidden_states", "position_ids", "return_dict", "use_cache"}
)
# Attributes whose presence means that logits are more than a scaled product of query and key.
_BIASES = ("relative_position_bias_table", "relative_position_bias", "relative_attention_bias", "rel_pos_h",
           "gru_rel_pos_linear", "distance_embedding")  # fmt: skip
_OUTPUT_NAMES = ("o_proj", "out_proj", "proj", "c_proj", "dense", "output_proj", "wo", "Wo", "to_out",
                 "output_dense")  # fmt: skip
_CROSS = re.compile(r"(^|[._])(encoder_attn|cross_attn|cross_attention|crossattention|enc_dec_attn)")


@dataclass(frozen=True)
class _Route:
    """What a routed module carries: who computes its calls, and what the original needs to run."""

    handler: Handler
    config: Any
    causal: bool
    prefix: int


class HFAdapter:
    """Generic adapter for Transformers models."""

    name = "transformers"

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether ``model`` is a Transformers model."""
        return isinstance(model, PreTrainedModel)

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree."""
        return [_describe(model, name, module) for name, module in _attention_modules(model)]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of one attention module to ``handler``.

        Args:
            model: The model.
            site: Name of the attention module.
            handler: Computes the attention output, or returns None for the original's.

        Returns:
            A function that puts the module back as it was.
        """
        module = model.get_submodule(site)
        previous: _Route | None = module.__dict__.get("latte_route")
        original = previous.config if previous else module.config
        config = copy.copy(original)
        # The public setter would write through to shared sub-configs.
        config._attn_implementation_internal = IMPLEMENTATION
        causal = _describe(model, site, module).causal
        module.__dict__["config"] = config
        module.__dict__["latte_route"] = _Route(handler, original, causal, _prefix_tokens(model, site))

        def undo() -> None:
            if previous is None:
                module.__dict__["config"] = original
                del module.__dict__["latte_route"]
            else:
                module.__dict__["latte_route"] = previous

        return undo

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The projection inside the attention module, or (BERT) in the ``output`` module beside it."""
        described = _describe(model, site, model.get_submodule(site))
        width = described.heads * described.head_dim
        parent = site.rpartition(".")[0]
        beside = [f"{parent}.output.dense"] if parent else ["output.dense"]
        for name in [f"{site}.{leaf}" for leaf in _OUTPUT_NAMES] + beside:
            try:
                layer = model.get_submodule(name)
            except AttributeError:
                continue
            if isinstance(layer, nn.Linear) and layer.in_features == width:
                return layer
        return None


def latte_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function behind our name in Transformers' ``AttentionInterface``.

    Args:
        module: The routed attention module.
        query: ``(B, H, Nq, d)``.
        key: ``(B, H, Nk, d)``.
        value: ``(B, H, Nk, dv)``.
        attention_mask: As the model built it: None, 2-D, or 4-D boolean or additive.
        dropout: Dropout of the attention weights; there are none to drop in a linear kernel.
        scaling: Factor on the logits; None is ``d**-0.5``.
        is_causal: Causality of this call, where the model passes it.
        **kwargs: Whatever else the model passes.

    Returns:
        The attention output ``(B, Nq, H, dv)``, and the original's attention weights where its function ran, which
        may be None; a converted layer has none.
    """
    route: _Route = module.latte_route
    original = _original_function(module, route.config._attn_implementation)
    original_kwargs = {**kwargs, "dropout": dropout, "scaling": scaling}
    if is_causal is not None:
        original_kwargs["is_causal"] = is_causal
    weights: list[Any] = []

    def exact() -> Tensor:
        output, attention = original(module, query, key, value, attention_mask, **original_kwargs)
        weights.append(attention)
        return output.transpose(1, 2)

    causal = route.causal if is_causal is None else bool(is_causal)
    obstacle, mask = _unknown_argument(kwargs), None
    if obstacle is None:
        try:
            mask = key_mask(attention_mask, queries=query.shape[2], keys=key.shape[2], causal=causal)
        except ValueError as error:
            obstacle = str(error)
    call = AttentionCall(
        module=module, query=query, key=key, value=value, mask=mask, causal=causal, exact=exact, obstacle=obstacle,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling), dropout=dropout,
        layout=_layout(query.shape[2], route.prefix),
    )  # fmt: skip
    output = route.handler(call)
    if output is None:
        output = exact()
    return output.transpose(1, 2).contiguous(), weights[-1] if weights else None


AttentionInterface.register(IMPLEMENTATION, latte_attention_forward)
# Models that build masks from a module's own config must not get None for a name they do not know.
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _original_function(module: nn.Module, implementation: str | None) -> Callable[..., tuple[Tensor, Any]]:
    eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    if implementation in (None, "eager"):
        return eager  # type: ignore[no-any-return]
    return AttentionInterface()[implementation]  # type: ignore[no-any-return]


def _unknown_argument(kwargs: dict[str, Any]) -> str | None:
    """What an attention call asks for that no linear kernel honours, or None."""
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _HARMLESS:
            return f"its attention call passes '{name}', which no linear kernel honours"
    return None


def _layout(tokens: int, prefix: int) -> TokenLayout:
    """Grid of a square image; an attention module does not know the height and width of any other."""
    side = int(max(tokens - prefix, 0) ** 0.5)
    return TokenLayout(prefix=prefix, grid=(side, side) if prefix and side * side == tokens - prefix else None)


@functools.lru_cache(maxsize=512)
def _dispatches(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if not name:
            continue
        if _dispatches(type(module)) or _computes_attention_itself(module):
            yield name, module


def _computes_attention_itself(module: nn.Module) -> bool:
    """Innermost modules called attention that project something and do not dispatch."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if not re.search(r"Attention|Attn", type(module).__name__):
        return False
    inner = [child for child in module.modules() if child is not module]
    if any(_dispatches(type(child)) or re.search(r"Attention|Attn", type(child).__name__) for child in inner):
        return False
    return sum(isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d) for child in inner) >= 2


def _describe(model: nn.Module, name: str, module: nn.Module) -> AttentionSite:
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "heads") or 1
    head_dim = _first(module, "head_dim", "attention_head_size", "head_size", "dim_head") or _width(module) // heads
    kind: Literal["self", "cross"] = (
        "cross" if _CROSS.search(name) or "CrossAttention" in type(module).__name__ else "self"
    )
    reason = _obstacle(model, name, module)
    return AttentionSite(
        name=name, tower=_tower(model, name), kind=kind, causal=kind == "self" and _is_causal(model, name, module),
        heads=heads, head_dim=head_dim, eligible=reason is None, reason=reason,
    )  # fmt: skip


def _obstacle(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Why a site must stay exact, or None."""
    if isinstance(module, nn.MultiheadAttention):
        parent = model.get_submodule(name.rpartition(".")[0])
        probe = isinstance(getattr(parent, "probe", None), Tensor)
        return "attention pooling by a learned probe: one query" if probe else "torch.nn.MultiheadAttention"
    if "Deformable" in type(module).__name__:
        return "deformable attention samples a few points: it is linear already"
    if any(getattr(module, attribute, None) is not None for attribute in _BIASES):
        return "relative-position bias on the logits"
    if getattr(module, "sliding_window", None) is not None or getattr(module, "window_size", None) is not None:
        return "windowed attention: it is linear already"
    if not _dispatches(type(module)):
        return "computes attention itself instead of through the Transformers attention interface"
    if not hasattr(module, "config"):
        return "has no config of its own, which the attention interface dispatches on"
    if (getattr(module, "num_key_value_groups", None) or 1) > 1:
        return "grouped-query attention"
    if getattr(module, "sinks", None) is not None:
        return "attention sinks"
    return None


def _is_causal(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a self-attention site is causal: its own flag, or the kind of mask its encoder builds."""
    if getattr(module, "is_causal", False) or getattr(module, "is_decoder", False):
        return True
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        ancestor = model.get_submodule(".".join(parts[:end]))
        code = getattr(inspect.unwrap(type(ancestor).forward), "__code__", None)
        names = code.co_names if code is not None else ()
        if "create_causal_mask" in names or "create_bidirectional_mask" in names:
            return "create_bidirectional_mask" not in names
    return False


def _tower(model: nn.Module, name: str) -> str:
    parts = name.lower().split(".")
    for word, tower in (("vision", "vision"), ("text", "text"), ("audio", "audio")):
        if any(word in part for part in parts):
            return tower
    if getattr(model.config, "is_encoder_decoder", False):
        return "decoder" if "decoder" in parts else "encoder"
    main = getattr(model, "main_input_name", "input_ids")
    return {"pixel_values": "vision", "input_ids": "text"}.get(main, "audio")


def _prefix_tokens(model: nn.Module, site: str) -> int:
    """CLS and register tokens in front of the patches of a vision tower, from its embedding module."""
    if _tower(model, site) != "vision":
        return 0
    parts = site.split(".")
    for end in range(len(parts) - 1, -1, -1):
        embeddings = getattr(model.get_submodule(".".join(parts[:end])), "embeddings", None)
        if embeddings is None:
            continue
        prefix = 0
        for attribute in ("cls_token", "class_embedding", "distillation_token", "register_tokens"):
            token = getattr(embeddings, attribute, None)
            if isinstance(token, Tensor):
                prefix += token.shape[1] if token.dim() == 3 else 1
        return prefix
    return 0


def _first(module: nn.Module, *attributes: str) -> int | None:
    for attribute in attributes:
        value = getattr(module, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _width(module: nn.Module) -> int:
    """Width of the query projection, for modules that do not say their head size."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    return linears[0].out_features if linears else 1

