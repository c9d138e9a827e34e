"""What part a Transformers attention module plays: its tower, causal or not, windowed or not, over an image or not.

All of it is read from the module's place in the model, its attributes and the code around it. What the first real call
of a site shows otherwise is corrected from the call (``observe``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from latte_convert.adapters.find import ancestors
from latte_convert.attention import AttentionSite

_TOWERS = {"vision": "vision", "visual": "vision", "image": "vision", "video": "vision", "text": "text",
           "audio": "audio", "speech": "audio"}  # fmt: skip
_TOWER = re.compile("|".join(_TOWERS))
_MAIN = {"pixel_values": "vision", "pixel_values_videos": "vision", "flattened_patches": "vision",
         "input_features": "audio", "input_values": "audio", "spectrogram": "audio", "audio_mel": "audio"}  # fmt: skip


def main_input(model: Any) -> str:
    """Name of the input that a model, or its class, is for; the first where there are several."""
    name = getattr(model, "main_input_name", "input_ids")
    return str(name if isinstance(name, str) else next(iter(name), "input_ids"))


def tower(model: nn.Module, name: str) -> str:
    """The tower that a site is in: as the modules around it are called, the innermost first, or as the model is."""
    parts = name.lower().split(".")[-2::-1]
    if found := next(filter(None, map(_TOWER.search, parts)), None):
        return _TOWERS[found[0]]
    if getattr(model.config, "is_encoder_decoder", False):
        return "decoder" if "decoder" in parts else "encoder"
    if any("language" in part for part in parts):
        return "text"
    main = _MAIN.get(main_input(model))
    if main == "vision" and "decoder" in parts:
        return "decoder"  # of a detector that does not call itself an encoder-decoder
    return main or _tower_of_class(type(model))


def _tower_of_class(kind: Any) -> str:
    """The tower that a model without a telling input is: a vision tower on its own is often said to take text ids."""
    modalities = getattr(kind, "input_modalities", ())
    modalities = (modalities,) if isinstance(modalities, str) else tuple(modalities)
    if "Vision" in kind.__name__ or (modalities and set(modalities) <= {"image", "video"}):
        return "vision"
    return "audio" if set(modalities) == {"audio"} else "text"


def is_causal(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a self-attention site is causal: its own flag, or the kind of mask that the model around it builds.

    The masks of a language model do not reach the tower beside it: a vision tower builds none, and of an audio tower
    the innermost model counts.
    """
    if getattr(module, "is_causal", False) or getattr(module, "is_decoder", False):
        return True
    role = tower(model, name)
    if role == "vision":
        return False
    for ancestor in ancestors(model, name):
        code = forward_code(type(ancestor))
        names = code.co_names if code is not None else ()
        if any(name.startswith(("create_causal_mask", "create_bidirectional_mask")) for name in names):
            return "create_bidirectional_mask" not in names
        if role == "audio" and isinstance(ancestor, PreTrainedModel):
            return False
    return False


def windowed(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether tokens see a part of the others only: by the module's settings, or by its layer's split of the image."""
    layer = model.get_submodule(name.rpartition(".")[0])
    if getattr(module, "use_mask_unit_attn", True) is False:
        return False
    sizes = [getattr(module, "sliding_window", None), *(getattr(m, "window_size", None) for m in (module, layer))]
    if any(any(size) if isinstance(size, tuple | list) else size for size in sizes):
        return True
    for index, holder in _layers_around(model, name):
        whole = getattr(holder, "fullatt_block_indexes", None)  # Qwen2.5-VL: the layers that see all of the image
        if whole is not None:
            return index not in whole
    # RF-DETR and LW-DETR put windows into the batch, except in layers that are global.
    inside = getattr(layer, "global_attention", None) is False or getattr(layer, "window", None) is True
    return inside and (first(layer, "num_windows") or 1) > 1


def _layers_around(model: nn.Module, name: str) -> Iterator[tuple[int, nn.Module]]:
    """Number of the layer that a site is in, with each module around the list of layers, innermost first."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        if parts[end].isdigit():
            for around in ancestors(model, ".".join(parts[: end + 1])):
                yield int(parts[end]), around


def image_tokens(model: nn.Module, site: AttentionSite) -> tuple[bool, int | None]:
    """Whether a site's keys may be an image, and how many CLS and register tokens stand before it; None if not told.

    The keys are one in a vision tower, in a detector's encoder and in the cross-attention to it, and in audio towers
    that embed patches of a spectrogram.
    """
    if site.tower in ("encoder", "decoder"):
        seen = _MAIN.get(main_input(model)) == "vision"
        if not seen or (site.tower == "decoder" and site.kind == "self"):  # the latter's are object queries
            return False, None
    elif site.tower == "text":
        return False, None
    # The keys of cross-attention are the encoder's tokens.
    holders = [getattr(model, "encoder", model)] if site.kind == "cross" else ancestors(model, site.name)
    for holder in holders:
        if (first(holder, "num_windows") or 1) > 1:
            return False, None  # window by window, each with its own CLS token
        embeddings = getattr(holder, "embeddings", None)
        if embeddings is None:
            continue
        if isinstance(getattr(embeddings, "detection_tokens", None), Tensor):
            return False, None  # behind the patches
        names = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
        tokens = [token for token in (getattr(embeddings, n, None) for n in names) if isinstance(token, Tensor)]
        return True, sum(token.shape[1] if token.dim() == 3 else 1 for token in tokens)
    return True, None


def dispatches(kind: type[nn.Module]) -> bool:
    """Whether attention modules of this class go through the Transformers attention interface."""
    code = forward_code(kind)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def eager_function(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The default that a class hands to the attention interface, by its name in the modelling file; None if unknown."""
    forward = inspect.unwrap(kind.forward)
    name = next((name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")), None)
    return None if name is None else forward.__globals__.get(name)


def forward_code(kind: type[nn.Module]) -> CodeType | None:
    """Code of a class's forward method, under its decorators."""
    return getattr(inspect.unwrap(kind.forward), "__code__", None)


def first(module: nn.Module, *attributes: str) -> int | None:
    """The first of some attributes of a module that is a positive whole number; None where none is."""
    values = (getattr(module, attribute, None) for attribute in attributes)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
