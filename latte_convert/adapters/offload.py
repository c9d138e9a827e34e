"""Models larger than memory: the weights of their blocks stay on disk, and are in memory while their block runs.

The hooks are accelerate's: around a block's forward, so that a block that is played back reads nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.checkpoints.hollow import build_hollow
from latte_convert.checkpoints.weights import OnDisk
from latte_convert.compat import require
from latte_convert.errors import CheckpointError, OutputError
from latte_convert.names import OFFLOADED

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint

_hooks: Any = require("accelerate.hooks", "offload")
_modeling: Any = require("accelerate.utils.modeling", "offload")


class _FromDisk(_hooks.ModelHook):  # type: ignore[misc]
    """Brings the weights of a block into memory before its forward, and lets go of them after it.

    What else comes into the block, such as a kernel, is left alone.

    Args:
        weights: By their names in the block.
        device: Where the block runs.
    """

    def __init__(self, weights: Mapping[str, Tensor], device: str) -> None:
        self.weights, self.device = weights, device

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for name, weight in self.weights.items():
            _modeling.set_module_tensor_to_device(module, name, self.device, value=weight)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for name in self.weights:
            _modeling.set_module_tensor_to_device(module, name, "meta")
        return output


@dataclass(frozen=True)
class Offloaded:
    """What a model carries whose blocks are on disk.

    Attributes:
        weights: Their weights, by their names in the model, each read when it is asked for.
        directory: Where more may be kept.
    """

    weights: Mapping[str, Tensor]
    directory: Path

    @contextmanager
    def brought_in(self, block: nn.Module) -> Iterator[None]:
        """The weights of a block in memory, for who reads them outside of its forward."""
        hook = block.__dict__.get("_hf_hook")
        if not isinstance(hook, _FromDisk):
            yield
            return
        hook.pre_forward(block)
        try:
            yield
        finally:
            hook.post_forward(block, None)


def open_offloaded(source: Checkpoint, resolution: int | None, directory: Path, device: str) -> tuple[Host, list[str]]:
    """Build the library's own class, strictly, with the weights of its blocks left in the files of the checkpoint.

    Args:
        source: The checkpoint.
        resolution: As for ``Checkpoint.instantiate``.
        directory: Keeps what the files do not hold as it is needed: weights that the library casts or computes.
        device: Where each block runs, and where the rest of the model is.

    Returns:
        The model with its adapter, and the keys it has no place for.

    Raises:
        CheckpointError: As for ``Checkpoint.instantiate``; or the model has no blocks that could be brought in one by
            one.
        OutputError: ``directory`` cannot be written, or has no room.
    """
    check_directory(directory)
    model, unexpected, weights = build_hollow(source, resolution)
    host = Host.of(model.requires_grad_(False))
    names = list(dict.fromkeys(host.block(site.name) for site in host.sites()))
    if not names or "" in names:
        raise CheckpointError(f"{source.id} has no list of blocks to bring in one by one: load it without --offload.")
    blocks = {name: dict(model.get_submodule(name).named_parameters(remove_duplicate=False)) for name in names}
    inside = {f"{block}.{name}": parameter for block, own in blocks.items() for name, parameter in own.items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in inside:
            tensor.data = weights.get(name, tensor.data).to(device)
    made = {name: parameter.data for name, parameter in inside.items() if name not in weights}
    kept: Mapping[str, Tensor] = ChainMap(weights, _written(made, directory))  # type: ignore[arg-type]
    for block, own in blocks.items():
        module, named = model.get_submodule(block), {name: f"{block}.{name}" for name in own}
        for name in own:
            _modeling.set_module_tensor_to_device(module, name, "meta")
        _hooks.add_hook_to_module(module, _FromDisk(_Renamed(kept, named), device))
    model.__dict__[OFFLOADED] = Offloaded(_Renamed(kept, {name: name for name in inside}), directory)
    return host, unexpected


class _Renamed(Mapping[str, Tensor]):
    """Some tensors of another mapping under other names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_directory(directory: Path) -> None:
    """Make a directory where weights can be kept.

    Raises:
        OutputError: It cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"no weights can be kept in {directory}: {reason}. Choose another --offload.") from None


def _written(tensors: Mapping[str, Tensor], directory: Path) -> Mapping[str, Tensor]:
    """Tensors put on disk, in a file that is gone when nobody reads it any more.

    Raises:
        OutputError: There is no room for them.
    """
    if not tensors:
        return {}
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    free = shutil.disk_usage(directory).free
    advice = "Make room, or choose another --offload."
    if free < needed * 1.01:
        raise OutputError(
            f"{directory} has {free / 1e6:,.0f} MB free, and {needed / 1e6:,.0f} MB of weights go there. {advice}"
        )
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder) / "weights.safetensors"
        try:
            save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{directory} has no room for {needed / 1e6:,.0f} MB: {error}. {advice}") from None
        return OnDisk([file])
