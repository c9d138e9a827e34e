"""How the tokens of a call lie on an image: what an attention module itself is never told.

Image and video models make their tokens with a convolution and flatten its map row by row. So while a site is routed,
the convolutions that come before it in the model note the size of their maps, and a call's grid is the nearest map that
its keys fill, but for the tokens that stand before it. Where there is none (patches embedded by a linear layer, dropped
or merged tokens), there is no grid: it is never guessed from a token count. Whether a site's keys may be an image at
all is for the adapter to say.

A call belongs to the image that it was made from, whatever else runs. Each thread has its own notes. Gradient
checkpointing computes a block a second time, in the backward pass and without the convolution: what was known when a
module on the way to a site was called is kept with the memory of its inputs, which is what the second call gets again.
In a compiled graph the notes are those of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert import compat
from latte_convert.attention import TokenLayout
from latte_convert.errors import CheckpointError
from latte_convert.graphs import plain

MOST_PREFIX = 16
"""Most tokens before a grid that are inferred where the model does not say how many there are."""
_NOTES = "latte_sizes"  # attribute of the memory of a tensor
_TELLS = "pos_embed_grid_size"
"""Attribute of timm's NaFlexEmbeds, which may embed patches by a linear layer, and returns the size of their grid."""
_graph_task = compat.GRAPH_TASK.get() or (lambda: -1)

Size = tuple[int, ...]
Map = tuple[Size, int]
"""The size of a map, and how many of it there are in a batch."""


def _backward() -> int:
    """Number of the backward pass that this thread is in; -1 outside."""
    number: int = _graph_task()
    return number


class _Watch:
    """A hook of one module that is shared by the routes that need it."""

    attribute: str
    handle: Any

    def __init__(self) -> None:
        self.routes = 0

    @classmethod
    def on(cls, module: nn.Module, undo: ExitStack) -> Any:
        """The hook of a module, which is put there if it is not yet, until ``undo`` and all others are closed."""
        found = module.__dict__.get(cls.attribute)
        if found is None:
            found = module.__dict__[cls.attribute] = cls()
            found.handle = found.register(module)
        found.routes += 1

        def remove() -> None:
            found.routes -= 1
            if not found.routes:
                found.handle.remove()
                del module.__dict__[cls.attribute]

        undo.callback(remove)
        return found

    def register(self, module: nn.Module) -> Any:
        raise NotImplementedError


class MapSize(_Watch):
    """Notes the size of the latest map of one convolution.

    Attributes:
        seen: All its maps so far.
    """

    attribute = "latte_map_size"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Map] = set()
        self._here = threading.local()
        # What a compiled graph goes by: it writes before it reads, and so does not depend on the call before.
        self._latest: Map | None = None
        self._compiled = False

    def register(self, module: nn.Module) -> Any:
        """Put the hook on a convolution."""
        return module.register_forward_hook(self)

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Note the size of ``output``.

        Args:
            output: ``(B, C, height, width)`` or ``(B, C, frames, height, width)``; or tokens and the size of their
                grid, None where there is none: an empty grid, which no tokens fill, so that none of before counts.
        """
        if isinstance(output, Tensor):
            self.saw(output.shape[2:], output.shape[0])
        else:
            self.saw(output[1] or (0, 0), output[0].shape[0])

    def saw(self, sides: Iterable[int], samples: int) -> None:
        """Note the size of so many maps."""
        size = tuple(plain(side) for side in sides)
        if torch.compiler.is_compiling():
            self._latest, self._compiled = (size, plain(samples)), True
        else:
            self.seen.add((size, samples))
            self.note(size, samples)

    def note(self, size: Size, samples: int = 1) -> None:
        """Take so many maps of a size for those of the calls that follow in this thread."""
        self._latest, self._compiled = (size, samples), False
        if (number := _backward()) == -1:
            self._here.map = size, samples
        else:
            self._here.again = number, (size, samples)

    def maps(self) -> tuple[Map, ...]:
        """What the map of this call may be; more than one only where a call is made again."""
        if self._compiled or torch.compiler.is_compiling():
            return () if self._latest is None else (self._latest,)
        if (number := _backward()) == -1:
            return (self._here.map,) if hasattr(self._here, "map") else ()
        last, latest = getattr(self._here, "again", (None, ((), 0)))
        return (latest,) if last == number else tuple(self.seen)

    def sizes(self) -> tuple[Size, ...]:
        """What the size of the map of this call may be."""
        sizes = [size for size, _ in self.maps()]
        return tuple(dict.fromkeys(sizes)) if len(sizes) > 1 else tuple(sizes)  # one may be symbolic, without a hash

    def frames(self, samples: int) -> Iterator[Size]:
        """The grids of as many frames as each of some samples has, where each frame has a map."""
        for size, number in self.maps():
            if number > samples and number % samples == 0:
                yield number // samples, *size

    def __getstate__(self) -> dict[str, Any]:
        # Not the latest size: after an export it may be symbolic, which cannot be copied.
        return {"routes": self.routes, "handle": self.handle, "seen": self.seen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)


class InputSize(MapSize):
    """Notes the size of the map that an attention module is given, ``(B, height, width, C)``, as SAM 2 does."""

    attribute = "latte_input_size"

    def register(self, module: nn.Module) -> Any:
        """Put the hook on an attention module."""
        return module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if tokens is not None and tokens.dim() == 4:
            self.saw(tokens.shape[1:3], tokens.shape[0])


class Entry(_Watch):
    """Keeps what is known of maps with the inputs of a module on the way to a site, and finds it again.

    Attributes:
        maps: The maps that are made outside of the module.
    """

    attribute = "latte_entry"

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[MapSize] = []

    def register(self, module: nn.Module) -> Any:
        """Put the hook on a module."""
        return module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note, or recall, before the module is called."""
        if torch.compiler.is_compiling():
            return
        memories = [memory for value in (*args, *kwargs.values()) if (memory := memory_of(value)) is not None]
        if _backward() != -1:
            for notes in (getattr(memory, _NOTES, {}) for memory in memories):
                for seen in self.maps:
                    if seen in notes:
                        seen.note(*notes[seen])
        known = {seen: maps[0] for seen in self.maps if len(maps := seen.maps()) == 1}
        for memory in memories:
            _write(memory, known)


def memory_of(value: Any) -> Any:
    """The memory of a tensor, which its views and detached copies share; None where it has none of its own."""
    try:
        return value.untyped_storage() if isinstance(value, Tensor) else None
    except (RuntimeError, NotImplementedError):
        return None


def _write(memory: Any, known: dict[MapSize, Map]) -> None:
    """Add to the notes of some memory; where calls disagree, it belongs to none of them (a parameter)."""
    notes = getattr(memory, _NOTES, None)
    if notes is None:
        setattr(memory, _NOTES, known)
    elif any(notes.get(seen, latest) != latest for seen, latest in known.items()):
        setattr(memory, _NOTES, {})
    elif notes:
        setattr(memory, _NOTES, {**notes, **known})


@dataclass(frozen=True)
class GivenSize:
    """A map whose size a user has given."""

    size: Size

    def sizes(self) -> tuple[Size, ...]:
        """As of ``MapSize``."""
        return (self.size,)

    def frames(self, samples: int) -> Iterator[Size]:
        """As of ``MapSize``."""
        if len(self.size) == 3:
            yield self.size


@dataclass
class SiteLayout:
    """What is known of the layout of one site before it is called.

    Attributes:
        prefix: Tokens before the patches among the keys, or None where there are no patches or the model does not say.
        cross: Whether queries and keys are different tokens even where they are as many.
        maps: What may be the map that the keys were flattened from, the likeliest first.
    """

    prefix: int | None = None
    cross: bool = False
    maps: tuple[MapSize | GivenSize, ...] = ()

    def of(self, queries: int, keys: int) -> TokenLayout:
        """The layout of one call.

        Raises:
            CheckpointError: The call is made again in a backward pass, and there are several images it may be of.
        """
        queries, keys = plain(queries), plain(keys)
        aligned, known = not self.cross and queries == keys, self.prefix or 0
        for inferred in (False, True):
            for seen in self.maps:
                if inferred and isinstance(seen, GivenSize) and self.prefix is not None:
                    continue
                fitting = [size for size in seen.sizes() if _fits(size, keys, None if inferred else known)]
                if len(fitting) > 1:
                    raise CheckpointError(_AMBIGUOUS.format(*fitting))
                if fitting:
                    return TokenLayout(keys - prod(fitting[0]), fitting[0], aligned)
        return TokenLayout(known, None, aligned)

    def of_frames(self, keys: int, samples: int) -> tuple[int, Size] | None:
        """Keys of frames one after another, each with tokens of its own before its patches, as VGGT has them.

        Returns:
            How many tokens that are, and the grid ``(frames, height, width)``; None where the keys lie otherwise.
        """
        for seen in self.maps:
            for grid in seen.frames(samples):
                before, rest = divmod(keys - prod(grid), grid[0])
                told = isinstance(seen, GivenSize) or self.prefix is not None
                if not rest and (before == self.prefix if told else 0 <= before <= MOST_PREFIX):
                    return before, grid
        return None


_AMBIGUOUS = (
    "an attention layer is computed again in the backward pass, and its tokens may be an image of {} or of {}: "
    "torch.utils.checkpoint was given something else than a block of the model and its inputs, or its inputs were "
    "moved to other memory. Give it the block itself, or images of one shape in each step."
)


def _fits(size: Size, keys: int, prefix: int | None) -> bool:
    """Whether a map of some size and so many keys before it are all keys; with None, whether it is nearly all."""
    left = keys - prod(size)
    return 0 <= left <= min(MOST_PREFIX, prod(size) - 1) if prefix is None else left == prefix


def watch(
    model: nn.Module,
    site: str,
    undo: ExitStack,
    *,
    image: bool,
    prefix: int | None = None,
    cross: bool = False,
    grid: Size | None = None,
) -> SiteLayout:
    """Have the convolutions that may make a site's tokens note the sizes of their maps.

    Args:
        model: The model.
        site: Name of the attention module.
        undo: Takes the hooks away when it is closed, unless other routes need them.
        image: Whether its keys may be an image: if not, nothing is watched.
        prefix: Tokens before the patches among its keys, or None where the model does not say.
        cross: Whether queries and keys are different tokens.
        grid: The size of a map that a user has given.

    Returns:
        What tells the layout of each call.
    """
    found = _convolutions(model, site) if image else []
    maps = {name: MapSize.on(model.get_submodule(name), undo) for name in found}
    for name in _on_the_way(model, site) if maps else ():
        entry = Entry.on(model.get_submodule(name), undo)
        outside = [seen for found, seen in maps.items() if not f"{found}.".startswith(f"{name}.")]
        entry.maps = list(dict.fromkeys([*entry.maps, *outside]))
    own = [InputSize.on(model.get_submodule(site), undo)] if image else []
    given = [] if grid is None else [GivenSize(grid)]
    return SiteLayout(prefix if image else None, cross, (*given, *maps.values(), *own))


def _on_the_way(model: nn.Module, site: str) -> Iterator[str]:
    """The children of all modules around a site: the first of them that a block calls gets what the block got."""
    parts = site.split(".")
    for end in range(len(parts)):
        around = ".".join(parts[:end])
        for name, _ in model.get_submodule(around).named_children():
            yield f"{around}.{name}" if around else name


def _convolutions(model: nn.Module, site: str) -> list[str]:
    """Those before a site in the order of the tree, the nearest first; then its own (they may shrink its keys)."""
    before: list[str] = []
    own: list[str] = []
    reached = False
    for name, module in model.named_modules():
        inside = name == site or name.startswith(f"{site}.")
        if reached and not inside:
            break
        reached = reached or inside
        if isinstance(module, nn.Conv2d | nn.Conv3d) or hasattr(module, _TELLS):
            (own if inside else before).append(name)
    return before[::-1] + own
