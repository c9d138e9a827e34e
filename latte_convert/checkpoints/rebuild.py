"""Models in memory: whether a directory can give them back, and writing them there with their own library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from latte_convert.checkpoints.module import build_module
from latte_convert.errors import CheckpointError
from latte_convert.names import is_ours
from latte_convert.wording import some

if TYPE_CHECKING:
    from torch import nn

_LIBRARIES = {"transformers": "hf", "timm": "timm"}

_WAYS_OUT = {
    ".lora_": "Merge the adapters into it first: model = peft_model.merge_and_unload()",
    ".parametrizations.": (
        "Fold the parametrizations in first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
    ),
    "packed_params": "Convert the model in floating point, and quantise the hybrid",
}
"""What a part of a tensor's name says that was done to a model, and how it is undone."""


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict, those of converted sites left out, detached."""
    return {key: value.detach() for key, value in model.state_dict().items() if not is_ours(key)}


def is_rebuilt(model: nn.Module) -> bool:
    """Whether its library builds a model again from the configuration that it carries.

    Returns:
        False for a module that no library builds by name.

    Raises:
        CheckpointError: The library would build another one, so that what is saved could not be loaded, or a part of
            the state is no tensor; the message names the tensors and the way out.
    """
    strange = [key for key, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if strange:
        raise CheckpointError(
            f"this {type(model).__name__} has state that is no tensor ({some(strange)}), which cannot be saved without "
            f"pickled code. {_way_out(strange)}."
        )
    library = _library(model)
    blueprint = library.blueprint(model) if library else None
    if blueprint is None:
        return False
    expected = blueprint.state_dict()
    if fault := difference(own_tensors(model), expected):
        extra = own_tensors(model).keys() - expected.keys()
        raise CheckpointError(
            f"this {type(model).__name__} could be saved but not loaded: against what its configuration builds, it has "
            f"{fault}. {_way_out(extra)}."
        )
    return True


def rebuilt(model: nn.Module) -> nn.Module:
    """What its library builds of a model that ``is_rebuilt``, with the model's own tensors, in eval mode; no copies."""
    library = _library(model)
    assert library is not None
    again: nn.Module = library.blueprint(model)
    again.load_state_dict(own_tensors(model), assign=True)
    for name, module in again.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:  # of no state dict: computed when a model is built
                module._buffers[key] = model.get_submodule(name)._buffers[key]
    return again.eval()


def check_factory(factory: str, model: nn.Module) -> None:
    """Refuse a function that does not build what is to be saved.

    Args:
        factory: ``package.module:function``; it is imported and called.
        model: The model that it should build.

    Raises:
        CheckpointError: It cannot be called, or builds a module with other tensors.
    """
    if fault := difference(own_tensors(model), own_tensors(build_module(factory))):
        raise CheckpointError(f"the model factory '{factory}' builds another module: the one given has {fault}.")


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """How tensors differ from others in names and shapes, as a phrase; None where they do not."""
    reshaped = (key for key in found.keys() & expected.keys() if found[key].shape != expected[key].shape)
    parts = (
        (found.keys() - expected.keys(), "more"),
        (expected.keys() - found.keys(), "missing"),
        (reshaped, "of another shape"),
    )
    faults = [f"{len(keys)} {what} ({some(keys)})" for names, what in parts if (keys := sorted(names))]
    return f"tensors {', '.join(faults)}" if faults else None


def write_model(model: nn.Module, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write a model that ``is_rebuilt`` as a checkpoint of its own library.

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
    return "Convert the model as its class builds it, or name a function that builds this one: model_factory"
