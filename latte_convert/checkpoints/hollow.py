"""Models whose tensors stay in the files of their checkpoint: built without memory for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.weights import OnDisk
from latte_convert.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def build_hollow(source: Checkpoint, resolution: int | None = None) -> tuple[nn.Module, list[str], OnDisk]:
    """Build the library's own class of hollow tensors, strictly; see ``Checkpoint.instantiate``.

    The library does with them what it does with any: it renames them, and what it does more (casts, joins,
    interpolates) shows in a tensor that is none of those it was given. Those behind such a tensor are read, and the
    model is built once more, with them.

    Returns:
        The model; the keys it has no place for; and what its hollow parameters and buffers stand for, by their names
        in the model.

    Raises:
        CheckpointError: As ``Checkpoint.instantiate``; or the library computes one tensor of so many that it cannot be
            told of which.
    """
    disk = source.original_on_disk()
    hollow = disk.hollow()
    model, unexpected = source.instantiate(dict(hollow), resolution)
    places = _places(model, hollow)
    if changed := disk.keys() - set(places.values()) - set(unexpected):
        model, unexpected = source.instantiate({**hollow, **{key: disk[key] for key in changed}}, resolution)
        places = _places(model, hollow)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if mixed := next((name for name, tensor in named.items() if name not in places and tensor.isnan().any()), None):
        raise CheckpointError(
            f"{source.id}: '{mixed}' is computed from several tensors, or is not a number: load it whole, without "
            "--offload."
        )
    return model, unexpected, disk.under(places)


def _places(model: nn.Module, hollow: Mapping[str, Tensor]) -> dict[str, str]:
    """The key of each tensor of a model that is a hollow one as it was given."""
    keys = {tensor.data_ptr(): key for key, tensor in hollow.items()}
    found: dict[str, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        key = keys.get(tensor.data_ptr())
        if key is not None and _form(tensor) == _form(hollow[key]):
            found[name] = key
    return found


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
