"""Which adapter a model gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from latte_convert.attention import Adapter

if TYPE_CHECKING:
    from torch import nn

_ADAPTERS = (
    ("transformers", "hf", "HFAdapter"),
    ("timm", "timm", "TimmAdapter"),
    ("open_clip", "open_clip", "OpenClipAdapter"),
    (None, "mha", "TorchAdapter"),
)


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter of the library that ``model`` comes from.

    Raises:
        CheckpointError: No adapter knows the model's class.
    """
    from importlib import import_module

    from latte_convert.errors import CheckpointError

    # Library by library, so that a Transformers model does not import timm; the last takes any model that has
    # torch.nn.MultiheadAttention in it.
    for library, home, name in _ADAPTERS:
        if library is None or library in {kind.__module__.partition(".")[0] for kind in type(model).__mro__}:
            adapter: Any = getattr(import_module(f"latte_convert.adapters.{home}"), name)
            if adapter.accepts(model):
                found: Adapter = adapter()
                return found
    raise CheckpointError(
        f"{type(model).__module__}.{type(model).__qualname__} is not a model this version can convert: it takes models "
        "of transformers, timm and open_clip, and others that use torch.nn.MultiheadAttention."
    )


def ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules around a module, innermost first."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        yield model.get_submodule(".".join(parts[:end]))
