"""timm models: every attention module that calls ``F.scaled_dot_product_attention`` and does no more than that.

What a module computes is read from its attributes and its bytecode, so a new model of timm needs no entry here.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable

from torch import nn

from latte_convert.adapters import sdpa
from latte_convert.adapters.find import ancestors
from latte_convert.adapters.route import route_site
from latte_convert.adapters.sdpa import calls_sdpa
from latte_convert.attention import AttentionSite, Handler

# Attributes of attention modules, or of the modules around them, that add to the logits by relative position.
_BIASES = ("relative_position_bias_table", "rel_pos_bias", "rel_pos", "shared_rel_pos", "rel_pos_h", "cpb_mlp",
           "attention_biases", "pos_embed_rel")  # fmt: skip
_WINDOWS = ("use_mask_unit_attn", "window_size", "ws", "partition_size", "block_size")
_ATTENTION = re.compile(r"Attention|Attn|GPSA|MHSA")
_POOLING = re.compile(r"Pool(?!First)|ClassAtt|ClsAtt")
_CHANNELS = re.compile(r"XCA|CrossCovariance|ChannelAtt")
_OUTPUTS = ("proj", "attn_out_proj", "out_proj", "o_proj")


class TimmAdapter:
    """Generic adapter for timm models."""

    name = "timm"

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether ``model`` is a timm model, or of a class derived from one."""
        return any(kind.__module__.partition(".")[0] == "timm" for kind in type(model).__mro__)

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree."""
        return [_describe(model, name, module) for name, module in model.named_modules() if name and _attends(module)]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of one attention module to ``handler``.

        A module that timm built without fused attention calls SDPA for as long as it is routed: its exact branch then
        differs from its own arithmetic by rounding.

        Args:
            model: The model.
            site: Name of the attention module.
            handler: Computes the attention output, or returns None for the original's.

        Returns:
            A function that takes this route away; with the last one the module is as it was. A second call does
            nothing.
        """
        fused = {"fused_attn": True} if "fused_attn" in model.get_submodule(site).__dict__ else {}
        prefix = _prefix_tokens(model, site)
        raster = not any(hasattr(holder, "unroll") for holder in ancestors(model, site))  # Hiera's order is its own
        biased = _biased(model, site, model.get_submodule(site))
        return route_site(
            model, site, handler, sdpa.stand_in, image=raster, prefix=prefix, biased=biased, attributes=fused
        )

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that reads the attention output; None behind a norm or a gate, or where there is none."""
        module = model.get_submodule(site)
        if getattr(module, "gate", None) is not None or not isinstance(getattr(module, "norm", None), _NOTHING):
            return None
        heads, head_dim = _heads(module)
        for name in _OUTPUTS:
            layer = getattr(module, name, None)
            if isinstance(layer, nn.Linear) and layer.in_features == heads * head_dim:
                return layer
        return None


_NOTHING = (type(None), nn.Identity)


def _attends(module: nn.Module) -> bool:
    """Whether a module computes attention: through SDPA, or with a softmax of its own."""
    if calls_sdpa(type(module)) or isinstance(module, nn.MultiheadAttention):
        return True
    methods = [method for method in vars(type(module)).values() if inspect.isfunction(method)]
    return bool(_ATTENTION.search(type(module).__name__)) and any("softmax" in m.__code__.co_names for m in methods)


def _describe(model: nn.Module, name: str, module: nn.Module) -> AttentionSite:
    heads, head_dim = _heads(module)
    reason = _obstacle(model, name, module)
    return AttentionSite(
        name=name, tower="vision", kind="self", causal=False, heads=heads, head_dim=head_dim,
        eligible=reason is None, reason=reason, biased=_biased(model, name, module),
    )  # fmt: skip


def _biased(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether something is added to the logits of a site by relative position."""
    return any(getattr(m, bias, None) is not None for m in (module, *ancestors(model, name)) for bias in _BIASES)


def _obstacle(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Why a site must stay exact, or None."""
    kind = type(module).__name__
    if _POOLING.search(kind):
        return "attention pooling: a few queries"
    if _CHANNELS.search(kind):
        return "attention over channels: it is linear in the tokens already"
    # BEiT's is the size of its whole grid.
    if _windowed(model, name, module) and ("Window" in kind or not hasattr(module, "relative_position_bias_table")):
        return "windowed attention: it is linear already"
    if reason := sdpa.obstacle(module):
        return reason
    if _softmaxes(type(module)) > 1:
        return f"combines {_softmaxes(type(module))} attention maps"
    return None


def _windowed(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a site attends within windows: the nearest module that has a setting for it says so."""
    for holder in (module, *ancestors(model, name)):
        for attribute in _WINDOWS:
            value = getattr(holder, attribute, None)
            if value is not None:
                return any(value) if isinstance(value, tuple | list) else bool(value)
    return False


def _softmaxes(kind: type[nn.Module]) -> int:
    """How often the forward of a class calls SDPA."""
    instructions = dis.get_instructions(inspect.unwrap(kind.forward))
    return sum(instruction.argval == "scaled_dot_product_attention" for instruction in instructions)


def _heads(module: nn.Module) -> tuple[int, int]:
    """Number of heads and channels per head; modules that do not name the latter have the query's width."""
    heads = next((n for name in ("num_heads", "heads") if isinstance(n := getattr(module, name, None), int)), 1)
    head_dim = next((n for name in ("head_dim", "key_dim") if isinstance(n := getattr(module, name, None), int)), 0)
    return heads, head_dim or _query_width(module) // heads


def _query_width(module: nn.Module) -> int:
    for name, parts in (("qkv", 3), ("q", 1), ("q_proj", 1)):
        layer = getattr(module, name, None)
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Linear | nn.Conv2d) and weight is not None:
            return int(weight.shape[0]) // parts
    return int(getattr(module, "embed_dim", 1))


def _prefix_tokens(model: nn.Module, name: str) -> int | None:
    """Class and register tokens before the patches, as the nearest module around a site counts them."""
    counts = (getattr(module, "num_prefix_tokens", None) for module in ancestors(model, name))
    return next((count for count in counts if isinstance(count, int)), None)
