"""open_clip models: its own towers, and those it takes from timm and Transformers.

Its transformer blocks hold ``torch.nn.MultiheadAttention`` or, with any of the custom settings, an attention of
their own that calls ``F.scaled_dot_product_attention``. A timm trunk or a Transformers text model inside is left to
the adapter of that library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from open_clip import CLIP, CoCa, CustomTextCLIP
from torch import nn

from latte_convert import compat
from latte_convert.adapters import mha, sdpa
from latte_convert.adapters.guests import Guest
from latte_convert.adapters.route import route_site
from latte_convert.attention import AttentionSite, Handler

_POOLING = "attention pooling by learned queries"


class OpenClipAdapter:
    """CLIP, CustomTextCLIP (SigLIP and others with a text tower of their own) and CoCa."""

    name = "open_clip"

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether ``model`` is one of open_clip's two-tower models."""
        return isinstance(model, CLIP | CustomTextCLIP | CoCa)

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree: towers ``vision`` and ``text``, CoCa's ``decoder``."""
        guests = {guest.path: guest for guest in _guests(model)}
        found: list[AttentionSite] = []
        for name, module in model.named_modules():
            if name in guests:
                found += guests[name].sites()
            elif not any(guest.holds(name) for guest in guests.values()):
                found += _own_site(model, name, module)
        return found

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of one attention module to ``handler``; routes nest, and undo in any order."""
        if (guest := _guest_of(model, site)) is not None:
            return guest.route(site, handler)
        torchs = isinstance(model.get_submodule(site), nn.MultiheadAttention)
        return route_site(
            model, site, handler, mha.stand_in if torchs else sdpa.stand_in,
            image=_tower(site) == "vision", prefix=1,  # the class token
            causal=_is_causal(model, site), cross=_is_cross(model, site),
        )  # fmt: skip

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that reads the attention output, or None where something stands between the two."""
        if (guest := _guest_of(model, site)) is not None:
            return guest.output_projection(site)
        module: Any = model.get_submodule(site)
        if isinstance(module, compat.OPEN_CLIP_ATTENTION.kind()) and not (
            module.head_scale is None and isinstance(module.ln_inner, nn.Identity)
        ):
            return None
        projection: nn.Linear = module.out_proj
        return projection


def _guests(model: nn.Module) -> Iterator[Guest]:
    visual, text = getattr(model, "visual", None), getattr(model, "text", None)
    if isinstance(visual, compat.OPEN_CLIP_TIMM.kind()):
        from latte_convert.adapters.timm import TimmAdapter

        yield Guest("visual.trunk", visual.trunk, TimmAdapter(), "vision")
    if isinstance(text, compat.OPEN_CLIP_TEXT.kind()):
        from latte_convert.adapters.hf import HFAdapter

        yield Guest("text.transformer", text.transformer, HFAdapter(), "text")


def _guest_of(model: nn.Module, site: str) -> Guest | None:
    return next((guest for guest in _guests(model) if guest.holds(site)), None)


def _own_site(model: nn.Module, name: str, module: Any) -> list[AttentionSite]:
    """The site of a module of open_clip's own, or none."""
    tower, causal = _tower(name), _is_causal(model, name)
    if isinstance(module, nn.MultiheadAttention):
        reason = _POOLING if _in_pooler(model, name) else None
        site = mha.describe(name, module, tower=tower, causal=causal, reason=reason)
        return [replace(site, kind="cross") if _is_cross(model, name) else site]
    if isinstance(module, compat.OPEN_CLIP_ATTENTION.kind()):
        reason = _obstacle(module)
        return [AttentionSite(name, tower, "self", causal, module.num_heads, module.head_dim, reason is None, reason)]
    if any(isinstance(module, pool.kind()) for pool in compat.OPEN_CLIP_POOLS):
        width = module.k_proj.out_features if hasattr(module, "k_proj") else module.embed_dim
        return [
            AttentionSite(name, tower, "cross", False, module.num_heads, width // module.num_heads, False, _POOLING)
        ]
    return []


def _obstacle(module: Any) -> str | None:
    """Why an attention of open_clip's own class must stay exact, or None."""
    if module.logit_scale is not None or not module.use_fsdpa:
        return f"{sdpa.BY_HAND} (scaled cosine)"
    return sdpa.obstacle(module)


def _tower(name: str) -> str:
    first = name.partition(".")[0]
    return {"visual": "vision", "text_decoder": "decoder"}.get(first, "text")


def _in_pooler(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), compat.OPEN_CLIP_POOLER.kind())


def _is_cross(model: nn.Module, name: str) -> bool:
    return ".cross_attn." in name or _in_pooler(model, name)


def _is_causal(model: nn.Module, name: str) -> bool:
    """Whether a site's tower has a causal mask: the text tower's, unless it is bidirectional, and CoCa's decoder."""
    tower = _tower(name)
    if tower == "vision" or ".cross_attn." in name:
        return False
    owner = model.get_submodule("text_decoder") if tower == "decoder" else getattr(model, "text", model)
    return isinstance(owner, compat.OPEN_CLIP_DECODER.kind()) or getattr(owner, "attn_mask", None) is not None
