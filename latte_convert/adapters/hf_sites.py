"""Where Transformers' attention modules are, how wide they are, and why some must stay exact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn

from latte_convert import compat
from latte_convert.adapters import mha, sdpa
from latte_convert.adapters.calls import GROUPED
from latte_convert.adapters.find import ancestors
from latte_convert.adapters.hf_explicit import is_explicit
from latte_convert.adapters.hf_roles import dispatches, eager_function, first, forward_code, is_causal, tower, windowed
from latte_convert.attention import AttentionSite

# Attributes of attention modules, or of the layers around them, whose presence means that something is added to the
# logits.
_BIASES = ("relative_position_bias_table", "relative_position_bias", "relative_attention_bias",
           "shared_position_bias", "rel_pos_h", "gru_rel_pos_linear", "distance_embedding")  # fmt: skip
_QUERY_NAMES = ("q_proj", "query", "query_proj", "q_lin", "q", "linear_q", "to_q", "wq",
                "value_proj")  # fmt: skip
_OUTPUT_NAMES = ("o_proj", "out_proj", "proj", "c_proj", "dense", "output_proj", "out_lin", "o", "wo", "Wo",
                 "linear_out", "to_out", "output_dense")  # fmt: skip
_CROSS = re.compile(r"(^|[._])(encoder_attn|multihead_attn|cross_?attn|cross_?attention|enc_dec_attn|EncDecAttention)")
FLEX = "the masks of flex_attention are programs: model.set_attn_implementation('sdpa') makes them plain"
_CALLED_ATTENTION = re.compile(r"Attention|Attn")
_CHANNELS = re.compile(r"Channel(Attention|Attn)|CrossCovariance")


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every attention in order of the tree, the ones that do not dispatch included."""
    for name, module in model.named_modules():
        if name and (dispatches(type(module)) or _computes_attention_itself(module)):
            yield name, module


def describe(model: nn.Module, name: str, module: nn.Module) -> AttentionSite:
    """The site of one attention module."""
    heads, head_dim = _heads(module)
    cross = _CROSS.search(name) or "CrossAttention" in type(module).__name__
    kind: Literal["self", "cross"] = "cross" if cross else "self"
    causal = not cross and is_causal(model, name, module)
    reason = _obstacle(model, name, module, causal)
    return AttentionSite(
        name=name, tower=tower(model, name), kind=kind, heads=heads, head_dim=head_dim, causal=causal,
        eligible=reason is None, reason=reason, biased=_has_bias(model, name, module),
    )  # fmt: skip


def output_projection(model: nn.Module, name: str, module: nn.Module) -> nn.Linear | None:
    """The layer that reads the attention output: in the module, or (BERT) in ``output`` beside it.

    GPT-2's ``Conv1D``, which holds its weight transposed, is given as the linear layer that it is.
    """
    heads, head_dim = _heads(module)
    parent = name.rpartition(".")[0]
    beside = f"{parent}.output.dense" if parent else "output.dense"
    for candidate in [f"{name}.{leaf}" for leaf in _OUTPUT_NAMES] + [beside]:
        try:
            layer = model.get_submodule(candidate)
        except AttributeError:
            continue
        if isinstance(layer, nn.Linear) and layer.in_features == heads * head_dim:
            return layer
        if isinstance(layer, compat.GPT2_LINEAR.kind()) and layer.weight.shape[0] == heads * head_dim:
            linear = nn.Linear(layer.weight.shape[0], layer.weight.shape[1], device="meta")
            linear.weight, linear.bias = nn.Parameter(layer.weight.detach().T), layer.bias
            return linear
    return None


def _computes_attention_itself(module: nn.Module) -> bool:
    """Innermost modules called attention that project something and do not dispatch."""
    if not _projects(module):
        return False
    inner = [child for child in module.modules() if child is not module]
    return not any(dispatches(type(child)) or _projects(child) for child in inner)


def _projects(module: nn.Module) -> bool:
    """Whether a module is called attention and has projections."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if not _CALLED_ATTENTION.search(type(module).__name__):
        return False
    return sum(isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d) for child in module.modules()) >= 2


def _heads(module: nn.Module) -> tuple[int, int]:
    """Number of heads and channels per head; modules that name only one of them have the query's width."""
    heads = first(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
    head_dim = first(module, "head_dim", "attention_head_size", "head_size", "dim_head", "key_value_proj_dim")
    if heads is None:
        heads = max(_query_width(module) // head_dim, 1) if head_dim else 1
    return heads, head_dim or _query_width(module) // heads


def _query_width(module: nn.Module) -> int:
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    for name in _QUERY_NAMES:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Linear):
            return layer.out_features
    for name, layer in module.named_children():
        if "qkv" in name.lower() and isinstance(layer, nn.Linear):
            return layer.out_features // 3
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    return first(module, "hidden_size", "d_model", "embed_dim") or (linears[0].out_features if linears else 1)


def _obstacle(model: nn.Module, name: str, module: nn.Module, causal: bool) -> str | None:
    """Why a site must stay exact, or None."""
    if compat.attention_implementation(getattr(module, "config", None)) == "flex_attention":
        return FLEX
    if isinstance(module, nn.MultiheadAttention):
        parent = model.get_submodule(name.rpartition(".")[0])
        probe = isinstance(getattr(parent, "probe", None), Tensor)
        return "attention pooling by a learned probe: one query" if probe else mha.obstacle(module)
    if "Deformable" in type(module).__name__ and not dispatches(type(module)):
        return "deformable attention samples a few points: it is linear already"
    if causal and _has_bias(model, name, module):
        return "relative-position bias on causal logits"
    if _CHANNELS.search(type(module).__name__):
        return "attention over channels: it is linear in the tokens already"
    if windowed(model, name, module):
        return "windowed attention: it is linear already"
    if not dispatches(type(module)):
        if is_explicit(module):
            return None
        code = forward_code(type(module))
        if sdpa.calls_sdpa(type(module)) and code is not None and "softmax" not in code.co_names:
            return sdpa.obstacle(module)
        return "computes attention itself instead of through the Transformers attention interface"
    return _dispatch_obstacle(module, causal)


def _dispatch_obstacle(module: nn.Module, causal: bool) -> str | None:
    """Why a module that goes through the attention interface must stay exact, or None."""
    if not hasattr(module, "config"):
        return "has no config of its own, which the attention interface dispatches on"
    if eager_function(type(module)) is None:
        return "hands the attention interface a default that is unknown here"
    if causal and (getattr(module, "num_key_value_groups", None) or 1) > 1:
        return GROUPED
    for attribute, reason in (("sinks", "attention sinks"), ("attn_logit_softcapping", "soft cap on the logits")):
        if getattr(module, attribute, None) is not None:
            return reason
    return None


def _has_bias(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a bias is added to the logits: by the module, one around it, or its call (T5 shares one)."""
    holders = (module, *ancestors(model, name))
    if any(getattr(holder, attribute, None) is not None for holder in holders for attribute in _BIASES):
        return True
    code = forward_code(type(module))
    constants = code.co_consts if code is not None and dispatches(type(module)) else ()
    # Keyword names of a call are one constant each, or a tuple of them.
    keywords = [name for const in constants for name in (const if isinstance(const, tuple) else (const,))]
    return "position_bias" in keywords
