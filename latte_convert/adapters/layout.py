"""How the tokens of a call lie on an image: what an attention module itself is never told.

Every image model makes its tokens with a convolution and flattens its map row by row. So while a site is routed, the
``Conv2d`` modules that come before it in the model remember the height and width of their latest output, and a call's
grid is the nearest map that has as many positions as the call has keys behind its prefix. Where there is none (patches
embedded by a linear layer, dropped or merged tokens), there is no grid: it is never guessed from a token count. Whether
a site's keys are an image at all, and how many tokens stand before it, is for the adapter to say.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from latte_convert.attention import TokenLayout


class MapSize:
    """Forward hook of one ``Conv2d``, shared by all sites behind it.

    Overwritten and never added to, so that a compiled graph, which writes it before it reads it, does not depend on
    the call before.

    Attributes:
        size: Height and width of the latest output, or None before the first.
        routes: How many routes read it.
    """

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.routes = 0

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        """Remember the size of ``output``, ``(B, C, height, width)``."""
        self.size = (output.shape[-2], output.shape[-1])

    def __getstate__(self) -> dict[str, Any]:
        # After an export the size may be symbolic, which cannot be copied; the next call brings a new one.
        return {"size": None, "routes": self.routes}


@dataclass
class SiteLayout:
    """What is known of the layout of one site before it is called.

    Attributes:
        prefix: Tokens before the patches among the keys, or None where the keys are no image.
        cross: Whether queries and keys are different tokens even where they are as many.
        maps: What may be the map that the keys were flattened from, the likeliest first.
    """

    prefix: int | None = None
    cross: bool = False
    maps: tuple[MapSize, ...] = ()

    def of(self, queries: int, keys: int) -> TokenLayout:
        """The layout of one call."""
        aligned = not self.cross and queries == keys
        if self.prefix is None:
            return TokenLayout(aligned=aligned)
        for seen in self.maps:
            if seen.size is not None and seen.size[0] * seen.size[1] == keys - self.prefix:
                return TokenLayout(self.prefix, seen.size, aligned)
        return TokenLayout(self.prefix, None, aligned)


def watch(model: nn.Module, site: str, undo: ExitStack, *, prefix: int | None, cross: bool = False) -> SiteLayout:
    """Have the convolutions that may make a site's tokens remember the size of their maps.

    Args:
        model: The model.
        site: Name of the attention module.
        undo: Takes the hooks away when it is closed, unless other routes read them.
        prefix: Tokens before the patches among its keys, or None where they are no image: then nothing is watched.
        cross: Whether queries and keys are different tokens.

    Returns:
        What tells the layout of each call.
    """
    found = [] if prefix is None else _convolutions(model, site)
    return SiteLayout(prefix, cross, tuple(_attach(convolution, undo) for convolution in found))


def _convolutions(model: nn.Module, site: str) -> list[nn.Module]:
    """Those before a site in the order of the tree, the nearest first; then its own (they may shrink its keys)."""
    before: list[nn.Module] = []
    own: list[nn.Module] = []
    reached = False
    for name, module in model.named_modules():
        inside = name == site or name.startswith(f"{site}.")
        if reached and not inside:
            break
        reached = reached or inside
        if isinstance(module, nn.Conv2d):
            (own if inside else before).append(module)
    return before[::-1] + own


def _attach(convolution: nn.Module, undo: ExitStack) -> MapSize:
    """The hook of a convolution, which is put there if it is not yet."""
    seen = next((hook for hook in convolution._forward_hooks.values() if isinstance(hook, MapSize)), None)
    if seen is None:
        seen = MapSize()
        convolution.register_forward_hook(seen)
    seen.routes += 1
    undo.callback(_detach, convolution, seen)
    return seen


def _detach(convolution: nn.Module, seen: MapSize) -> None:
    seen.routes -= 1
    if not seen.routes:
        for key in [key for key, hook in convolution._forward_hooks.items() if hook is seen]:
            del convolution._forward_hooks[key]
