"""Which adapter a model gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from latte_convert.attention import Adapter

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.adapters.guests import Guest

_LIBRARIES = {
    "transformers": "hf:HFAdapter",
    "timm": "timm:TimmAdapter",
    "open_clip": "open_clip:OpenClipAdapter",
}


Otherwise = Callable[[Sequence[str]], Adapter]
"""Makes the adapter of a module of no library, of what is known of its runs; at some paths in it are models of one."""


def find_adapter(model: nn.Module, otherwise: Otherwise | None = None) -> Adapter:
    """The adapter of the library that ``model`` comes from, or of those that the models inside it come from.

    Args:
        model: The model.
        otherwise: Makes the adapter where no library knows the model itself; without it, of such a module only
            ``torch.nn.MultiheadAttention`` is known.

    Raises:
        CheckpointError: No adapter knows the model's class, nor one in it.
    """
    from latte_convert.adapters.guests import GuestAdapter
    from latte_convert.adapters.mha import TorchAdapter
    from latte_convert.errors import CheckpointError

    own = of_library(model)
    if own is not None and own.name != "transformers":
        return own  # timm has no guests, and open_clip knows its own
    guests = _guests(model, own)
    if own is None and otherwise is not None:
        own = otherwise([guest.path for guest in guests])
    if guests:
        return GuestAdapter(own or TorchAdapter(), guests)
    if own is None and TorchAdapter.accepts(model):
        return TorchAdapter()
    if own is None:
        raise CheckpointError(
            f"{type(model).__module__}.{type(model).__qualname__} is not a model this version can convert: it takes "
            "models of transformers, timm and open_clip, also inside other modules, others that use "
            "torch.nn.MultiheadAttention and, loaded and with ready batches, any that computes attention."
        )
    return own


def _guests(model: nn.Module, own: Adapter | None) -> list[Guest]:
    """The outermost models of another library inside a model, those without attention left out."""
    from latte_convert.adapters.guests import Guest

    found: list[Guest] = []
    for name, module in model.named_modules():
        if not name or any(guest.holds(name) for guest in found):
            continue
        adapter = of_library(module)
        if adapter is not None and (own is None or adapter.name != own.name):
            found.append(Guest(name, module, adapter))
    return [guest for guest in found if guest.adapter.sites(guest.model)]


def of_library(model: nn.Module) -> Adapter | None:
    """The adapter of a model's own library; None where it is not a model of one."""
    # Library by library, so that a Transformers model does not import timm.
    for library in {kind.__module__.partition(".")[0] for kind in type(model).__mro__} & _LIBRARIES.keys():
        home, name = _LIBRARIES[library].split(":")
        adapter: Any = getattr(import_module(f"latte_convert.adapters.{home}"), name)
        if adapter.accepts(model):
            found: Adapter = adapter()
            return found
    return None


def ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules around a module, innermost first."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        yield model.get_submodule(".".join(parts[:end]))
