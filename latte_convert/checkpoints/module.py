"""Modules that no library builds from a configuration: what comes back is built by the caller, or by a function of his.

No code is stored. An artifact of such a module holds its tensors, and the import path of a function that builds it
where one was named; that is imported only where the caller says so.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import nn

from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.weights import Place, read_file, weight_files
from latte_convert.errors import CheckpointError, first_line
from latte_convert.names import FACTORY
from latte_convert.wording import some

if TYPE_CHECKING:
    from torch import Tensor

    from latte_convert.data.processor import Processor
    from latte_convert.data.samples import Modality


def build_module(factory: str) -> nn.Module:
    """Import a function by its path and have it build a module.

    Args:
        factory: ``package.module:function``; the function takes no arguments.

    Raises:
        CheckpointError: It cannot be imported, fails, or returns something else.
    """
    if not re.fullmatch(FACTORY, factory):
        raise CheckpointError(f"the model factory '{factory}' is not of the form package.module:function.")
    home, _, path = factory.partition(":")
    try:
        found = import_module(home)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"the model factory '{factory}' cannot be imported: {first_line(error)}. It is looked for on Python's path "
            "(PYTHONPATH)."
        ) from error
    try:
        module = found()  # type: ignore[operator]
    except Exception as error:  # code of the user's own
        raise CheckpointError(f"the model factory '{factory}' failed: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"the model factory '{factory}' returned a {type(module).__name__}, not a torch module.")
    return module


def load_module(factory: str, weights: str | Path | None) -> nn.Module:
    """A module that a function builds, with the weights of a file or directory, strictly, or with its own.

    Raises:
        CheckpointError: The function does not build one, or the weights are not there or are not its own.
    """
    module = build_module(factory)
    if weights is None:
        return module.eval()
    path = Path(weights).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"there is no {path}: beside a model factory, MODEL is a safetensors file or a directory with one."
        )
    source = ModuleCheckpoint(path.absolute(), f"{type(module).__module__}:{type(module).__qualname__}", module)
    filled, unexpected = source.instantiate(source.read_tensors())
    if unexpected:
        raise CheckpointError(f"{path} holds tensors that {factory} has no place for: {some(unexpected, 5)}.")
    return filled


class ModuleCheckpoint(Checkpoint):
    """The tensors of a module and, once it is given, the module to fill with them.

    Args:
        path: Its directory, or its weight file.
        kind: Import path of its class, for messages.
        module: What to fill; None where only the tensors are read.
    """

    library = "torch"

    def __init__(self, path: Path, kind: str, module: nn.Module | None = None) -> None:
        place = Place(str(path), path.parent, path) if path.is_file() else Place(str(path), path)
        super().__init__(place, weight_files(place), {})
        self.kind = kind
        self.module = module

    @property
    def model_class(self) -> str:
        """Name of the module's class."""
        return (type(self.module).__qualname__ if self.module else self.kind.partition(":")[2]).rpartition(".")[2]

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Unknown: what a module takes is for its owner to say."""
        self._refuse()

    def processor(self, modality: Modality) -> Processor:
        """There is none."""
        self._refuse()

    def image_processor(self, resolution: int) -> Processor:
        """There is none."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self.id} holds a module of the class {self.kind}, which has no preprocessing of its own: load it with "
            "latte_convert.load(directory, model=…) and run it on inputs of yours."
        )

    def sidecars(self) -> list[str]:
        """None: only the tensors are the module's."""
        return []

    def read_tensors(self) -> dict[str, Tensor]:
        """All tensors under their own keys: a module may have children of any name."""
        return {key: tensor for file in self.weights for key, tensor in read_file(file).items()}

    def _skeleton(self) -> nn.Module:
        if self.module is None:
            raise CheckpointError(f"{self.id} holds a module of the class {self.kind}; give one to fill.")
        return self.module

    def _instantiate(self, tensors: dict[str, Tensor], resolution: int | None) -> tuple[nn.Module, list[str]]:
        """Fill the module, strictly; see ``Checkpoint``."""
        module = self._skeleton()
        unexpected = self.fill(module, tensors, f"give the module as it was saved, a {self.kind}")
        return module.eval(), unexpected
