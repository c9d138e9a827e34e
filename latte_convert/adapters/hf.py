"""Transformers models: every attention module that dispatches through ``ALL_ATTENTION_FUNCTIONS``, and two more.

The dispatch reads the name of the implementation from the module's own ``config`` and hands the module over,
so a site is routed by giving that one module a copy of its config with our name in it. No forward is copied,
the other modules keep running the original code, and the model's masks are built as before. What does not dispatch
stays exact, but for ``torch.nn.MultiheadAttention``, classes that call ``scaled_dot_product_attention`` themselves (of
SAM's encoder), and the two that ``hf_explicit`` reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from latte_convert import compat
from latte_convert.adapters import hf_explicit, hf_roles, hf_sites, mha, sdpa
from latte_convert.adapters.calls import attention_call
from latte_convert.adapters.route import NAME, Route, StandIn, route_site
from latte_convert.attention import AttentionSite, Handler
from latte_convert.errors import CheckpointError

IMPLEMENTATION = "latte"

# Keyword arguments that the layers above pass through and that do not change what attention computes.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "interpolate_pos_encoding", "logits_to_keep", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "position_bias", "position_ids", "return_dict", "use_cache",
})  # fmt: skip


class HFAdapter:
    """Generic adapter for Transformers models."""

    name = "transformers"

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether ``model`` is a Transformers model."""
        return isinstance(model, PreTrainedModel)

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree."""
        return [hf_sites.describe(model, name, module) for name, module in hf_sites.attention_modules(model)]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of one attention module to ``handler``.

        Routes nest: the latest one computes, and they can be undone in any order.

        Args:
            model: The model.
            site: Name of the attention module.
            handler: Computes the attention output, or returns None for the original's.

        Returns:
            A function that takes this route away; with the last one the module is as it was. A second call
            does nothing.
        """
        module = model.get_submodule(site)
        described = hf_sites.describe(model, site, module)
        stand_in: StandIn | None = None
        settings: dict[str, Any] = {"causal": described.causal, "biased": described.biased}
        if isinstance(module, nn.MultiheadAttention):
            stand_in = mha.stand_in
        elif hf_explicit.is_explicit(module):
            stand_in = hf_explicit.stand_in_of(module)
        elif not hf_roles.dispatches(type(module)):
            stand_in = sdpa.stand_in
        else:
            config: Any = copy.copy(module.config)
            compat.set_attention_implementation(config, IMPLEMENTATION)
            settings |= {"eager": hf_roles.eager_function(type(module)), "attributes": {"config": config}}
        image, prefix = hf_roles.image_tokens(model, described)
        cross = described.kind == "cross"
        return route_site(model, site, handler, stand_in, image=image, prefix=prefix, cross=cross, **settings)

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that reads the attention output, or None where it cannot be told."""
        return hf_sites.output_projection(model, site, model.get_submodule(site))


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
        **kwargs: Whatever else the model passes; ``position_bias``, ``(1 or B, H, Nq, Nk)``, is added to the logits.

    Returns:
        The attention output ``(B, Nq, H, dv)``, and attention weights where the original's function ran or they are
        asked for and it gives any: exact ones, of a converted layer too, so that ``attentions`` has an entry a layer.

    Raises:
        CheckpointError: The mask is one of flex_attention.
    """
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise CheckpointError(f"{type(module).__name__}: {hf_sites.FLEX}.")
    route: Route = module.__dict__[NAME]
    implementation = compat.attention_implementation(route.replaced["config"]) or "eager"
    original = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, route.eager)
    original_kwargs = {**kwargs, "dropout": dropout, "scaling": scaling}
    if is_causal is not None:
        original_kwargs["is_causal"] = is_causal
    weights: list[Any] = []

    def exact() -> Tensor:
        output: Tensor
        output, attention = original(module, query, key, value, attention_mask, **original_kwargs)
        weights.append(attention)
        return output.transpose(1, 2)

    call = attention_call(
        module, route.layout, query, key, value, exact, scale=scaling, masks=[attention_mask],
        bias=kwargs.get("position_bias"), biased=route.biased,
        causal=_flagged_causal(module, implementation, attention_mask, query.shape[2], is_causal),
        triangle=route.causal or bool(is_causal), either=not torch.compiler.is_compiling(),
        obstacle=_unknown_argument(kwargs), dropout=dropout,
    )  # fmt: skip
    output = route.ask(call)
    if output is None:
        output = exact()
    if not weights and implementation == "eager" and hf_explicit.weights_asked_for(kwargs):
        exact()
    return output.transpose(1, 2).contiguous(), weights[-1] if weights else None


AttentionInterface.register(IMPLEMENTATION, latte_attention_forward)
# Where a model builds masks from a module's own config, a name unknown here would drop them without a word.
AttentionMaskInterface.register(IMPLEMENTATION, compat.MASKS_OF_SDPA.require())


def _flagged_causal(
    module: nn.Module, implementation: str | None, mask: Tensor | None, queries: int, is_causal: bool | None
) -> bool:
    """Whether the original would be causal in this call whatever its mask says.

    Its functions read ``is_causal`` only where there is no mask with a row per query; eager ones never do.
    """
    if queries == 1 or (mask is not None and mask.dim() == 4) or implementation in (None, "eager"):
        return False
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _unknown_argument(kwargs: dict[str, Any]) -> str | None:
    """What an attention call asks for that no linear kernel honours, or None."""
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _HARMLESS:
            return f"its attention call passes '{name}', which no linear kernel honours"
    return None
