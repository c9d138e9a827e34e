"""Which adapter a model gets, and where its attention is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latte_convert.attention import Adapter, AttentionSite

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


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """List every attention module of a model, the ones that cannot be converted included.

    Raises:
        CheckpointError: No adapter knows the model's class.
    """
    return find_adapter(model).sites(model)


def enclosing_block(model: nn.Module, site: str) -> str:
    """Name of the transformer block around a site: its nearest ancestor that is an item of a module list.

    Where a model has no such list, the site itself stands in for its block.
    """
    from torch import nn

    parts = site.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList | nn.Sequential):
            return ".".join(parts[: end + 1])
    return site
