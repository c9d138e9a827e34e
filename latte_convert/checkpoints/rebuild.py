"""Models in memory: whether a directory can give them back, and writing them there with their own library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte_convert.errors import CheckpointError
from latte_convert.names import is_ours
from latte_convert.wording import some

if TYPE_CHECKING:
    from torch import Tensor, nn

_LIBRARIES = {"transformers": "hf", "timm": "timm"}

_WAYS_OUT = {
    ".lora_": "Merge the adapters into it first: model = peft_model.merge_and_unload()",
    ".parametrizations.": (
        "Fold the parametrizations in first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
    ),
    "_packed_params": "Convert the model in floating point, and quantise the hybrid",
}
"""What a part of a tensor's name says that was done to a model, and how it is undone."""


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict, those of converted sites left out, detached."""
    return {key: value.detach() for key, value in model.state_dict().items() if not is_ours(key)}


def check_rebuildable(model: nn.Module) -> None:
    """Refuse a model whose class would not build it again from its configuration: what is saved could not be loaded.

    A model that no library builds by name passes; see ``can_write``.

    Raises:
        CheckpointError: It has tensors more, less or of other shapes; the message names them and the way out.
    """
    library = _library(model)
    expected = library.blueprint(model) if library else None
    if expected is None:
        return
    found = own_tensors(model)
    extra, missing = sorted(found.keys() - expected.keys()), sorted(expected.keys() - found.keys())
    reshaped = sorted(key for key in found.keys() & expected.keys() if found[key].shape != expected[key].shape)
    faults = [
        f"{len(keys)} {what} ({some(keys)})"
        for keys, what in ((extra, "more"), (missing, "missing"), (reshaped, "of another shape"))
        if keys
    ]
    if faults:
        raise CheckpointError(
            f"this {type(model).__name__} could be saved but not loaded: against what its configuration builds, it has "
            f"tensors {', '.join(faults)}. {_way_out(extra)}."
        )


def can_write(model: nn.Module) -> bool:
    """Whether the library of a model writes it as a directory that it builds the model from again."""
    library = _library(model)
    return library is not None and library.blueprint(model) is not None


def write_model(model: nn.Module, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write a model that ``can_write`` as a checkpoint of its own library.

    Args:
        model: The model, for its class and configuration.
        tensors: Its tensors, under its own keys.
        directory: An empty directory.
    """
    library = _library(model)
    assert library is not None
    library.write_model(model, dict(tensors), directory)


def _library(model: nn.Module) -> Any:
    """The module that knows the checkpoints of a model's library, or None."""
    homes = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    found = next((home for name, home in _LIBRARIES.items() if name in homes), None)
    return import_module(f"latte_convert.checkpoints.{found}") if found else None


def _way_out(extra: Iterable[str]) -> str:
    for mark, way in _WAYS_OUT.items():
        if any(mark in key for key in extra):
            return way
    return "Convert the model as its class builds it"
