"""A checkpoint on disk: what every library's kind of it can do."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from latte_convert.checkpoints.weights import INDEX, SIDECARS, OnDisk, Place, is_hollow, leads_out, read_file
from latte_convert.errors import CheckpointError
from latte_convert.names import CARD, MANIFEST, ORIGINAL, is_ours, is_report
from latte_convert.wording import some

if TYPE_CHECKING:
    from torch import Tensor, nn

    from latte_convert.data.processor import Processor
    from latte_convert.data.samples import Modality

logger = logging.getLogger("latte_convert")

T = TypeVar("T")

_WRAPPERS = ("module.", "_orig_mod.")
_LAYERS = re.compile(r"(layers?|depths?|blocks)$")
_FEW_LAYERS, _FEW_PARAMETERS = 100, 10**8


class Checkpoint(ABC):
    """A resolved checkpoint: where it is and what it holds. One subclass a library.

    Args:
        place: Where it is, and what may be done with it.
        weights: The weight files, safetensors unless a pickle was allowed.
        config: Contents of the configuration that its library reads.

    Attributes:
        library: Name of the library that its class comes from.
        weights_stem: Under which name its library keeps weights, ``<stem>.safetensors``.
        id: What the user called it: a Hub id, or the absolute path.
        path: Its local directory.
        revision: Commit of the Hub snapshot, or None.
        trust_remote_code: Whether Python code of the checkpoint may run.
    """

    library: ClassVar[str]
    weights_stem: ClassVar[str] = "model"

    def __init__(self, place: Place, weights: tuple[Path, ...], config: dict[str, Any]) -> None:
        self.id, self.path, self.revision = place.id, place.path, place.revision
        self.trust_remote_code = place.trust_remote_code
        self.weights, self.config = weights, config

    @property
    @abstractmethod
    def model_class(self) -> str:
        """Name of the class it loads into.

        Raises:
            CheckpointError: The library does not know it.
        """

    @property
    @abstractmethod
    def modalities(self) -> tuple[Modality, ...]:
        """What kinds of samples the model takes, the main one first."""

    @abstractmethod
    def processor(self, modality: Modality) -> Processor:
        """The checkpoint's own preprocessing.

        Raises:
            CheckpointError: The checkpoint does not say how its inputs are prepared.
        """

    def processor_at(self, modality: Modality, resolution: int | None) -> Processor:
        """The checkpoint's preprocessing, for images of another size than its own where ``resolution`` is given.

        Raises:
            CheckpointError: The model does not run at that size.
        """
        if resolution is None or modality != "image":
            return self.processor(modality)
        return self.image_processor(resolution)

    @abstractmethod
    def image_processor(self, resolution: int) -> Processor:
        """The checkpoint's own preprocessing, but for images of ``resolution`` pixels in height and width.

        Raises:
            CheckpointError: The checkpoint does not say how images are prepared, or does not run at that size.
        """

    def instantiate(self, tensors: dict[str, Tensor], resolution: int | None = None) -> tuple[nn.Module, list[str]]:
        """Build the library's own class from tensors, strictly.

        Args:
            tensors: The checkpoint's tensors, under the checkpoint's keys.
            resolution: Height and width of images in pixels, if not the checkpoint's own. Positions are interpolated
                as the library does it; a class that does so in its forward is the same at any resolution.

        Returns:
            The model in eval mode, and the keys it has no place for.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape; it would be random. Or the library cannot run
                the model at that resolution. Or its configuration describes another, far larger model.
        """
        self._check_size(tensors)
        return self._instantiate(tensors, resolution)

    @abstractmethod
    def _instantiate(self, tensors: dict[str, Tensor], resolution: int | None) -> tuple[nn.Module, list[str]]: ...

    @abstractmethod
    def _skeleton(self) -> nn.Module:
        """The model on the device ``meta``: shapes without memory."""

    def _check_size(self, tensors: dict[str, Tensor]) -> None:
        """Refuse a configuration that describes a far larger model, before its building takes hours or all memory."""
        asked = max(_layer_counts(self.config), default=0)
        if asked > max(len(tensors), _FEW_LAYERS):
            raise CheckpointError(
                f"{self.id}: its configuration asks for {asked:,} layers, and its weights are {len(tensors)} tensors."
            )
        size = sum(parameter.numel() for parameter in self._skeleton().parameters())
        there = sum(tensor.numel() for tensor in tensors.values())
        if size > 2 * there + _FEW_PARAMETERS:
            raise CheckpointError(
                f"{self.id}: its configuration describes a model of {size:,} parameters, and its weights are {there:,}."
            )

    def fill(self, model: nn.Module, tensors: dict[str, Tensor], advice: str) -> list[str]:
        """Copy tensors into a model, strictly.

        Args:
            model: Of this checkpoint's class.
            tensors: Under the model's keys.
            advice: What to do if they do not fit.

        Returns:
            The keys that the model has no place for, sorted.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape.
        """
        expected = model.state_dict()
        shared = expected.keys() & tensors.keys()
        mismatched = [key for key in shared if tensors[key].shape != expected[key].shape]
        self.check_filled(expected.keys() - shared, mismatched, advice)
        if hollow := any(map(is_hollow, tensors.values())):  # what is to be cast is told by not being the same
            tensors = {key: tensors[key].to(expected[key].dtype) if key in shared else tensors[key] for key in tensors}
        model.load_state_dict(tensors, strict=False, assign=hollow)
        return sorted(tensors.keys() - shared)

    def check_filled(self, missing: Iterable[str], mismatched: Iterable[str], advice: str) -> None:
        """Refuse a checkpoint that leaves parts of its model random.

        Raises:
            CheckpointError: There are such tensors; the message names them and gives ``advice``.
        """
        faults = [
            f"{len(keys)} tensors {what} ({some(keys)})"
            for keys, what in ((sorted(missing), "missing"), (sorted(mismatched), "of another shape"))
            if keys
        ]
        if faults:
            raise CheckpointError(
                f"{self.id} does not fill {self.model_class}: {'; '.join(faults)}. They would be random; {advice}."
            )

    @property
    def is_artifact(self) -> bool:
        """Whether the directory was written by this tool."""
        return (self.path / MANIFEST).is_file()

    def sidecars(self) -> list[str]:
        """Small files that belong to the checkpoint, relative to it: configuration, tokenizer, processor, licence."""
        indices = {INDEX, f"{self.weights_stem}.safetensors.index.json", "pytorch_model.bin.index.json"}
        found = {path for pattern in SIDECARS for path in self.path.glob(pattern) if path.is_file()}
        theirs = {path for path in found if path.name not in {MANIFEST, *indices} and not self._leads_out(path)}
        if self.is_artifact:
            ours = {self.path / CARD}
            theirs = {path for path in theirs - ours if not is_report(path.name)}
            theirs |= {self.path / path.name for path in (self.path / ORIGINAL).glob("*")}
        return sorted(path.relative_to(self.path).as_posix() for path in theirs)

    def sidecar(self, name: str) -> Path:
        """Where a file of ``sidecars`` lies as the source had it."""
        kept = self.path / ORIGINAL / name
        return kept if self.is_artifact and kept.is_file() else self.path / name

    def _leads_out(self, path: Path) -> bool:
        if leads_out(path, self.path):
            logger.warning("%s links to %s, outside the checkpoint, and is not copied", path, path.resolve())
            return True
        return False

    def read_tensors(self) -> dict[str, Tensor]:
        """All tensors under their own keys, ours included where it is an artifact.

        What a wrapper of training put before every key (``module.``, ``_orig_mod.``) is left out.

        Raises:
            CheckpointError: A file is damaged.
        """
        tensors: dict[str, Tensor] = {}
        for file in self.weights:
            tensors.update(read_file(file))
        self._check_floats(tensors)
        return without_wrappers(tensors)

    def _check_floats(self, tensors: Mapping[str, Tensor]) -> None:
        strange = [str(t.dtype) for t in tensors.values() if t.is_floating_point() and t.itemsize < 2]
        if strange:
            raise CheckpointError(f"{self.id} holds quantised weights ({strange[0]}); give the unquantised checkpoint.")

    def original_tensors(self) -> dict[str, Tensor]:
        """The source's own tensors: all of them, or without ours where it is an artifact.

        Raises:
            CheckpointError: A file is damaged.
        """
        tensors = self.read_tensors()
        return {key: tensors[key] for key in self._theirs(tensors)}

    def _theirs(self, keys: Iterable[str]) -> list[str]:
        """The keys that are not ours."""
        ours = set(filter(is_ours, keys))
        if ours and not self.is_artifact:
            raise CheckpointError(f"{self.id} has a tensor '{min(ours)}': names of this form are for converted sites.")
        return [key for key in keys if key not in ours]

    def on_disk(self) -> OnDisk:
        """All tensors as ``read_tensors`` gives them, each read when it is asked for.

        Raises:
            CheckpointError: A file is damaged, or is a pickle.
        """
        if pickle := next((file for file in self.weights if file.suffix != ".safetensors"), None):
            raise CheckpointError(f"{pickle} is a pickle, which is read as a whole: give safetensors, or no --offload.")
        found = OnDisk(self.weights)
        self._check_floats(found.hollow())
        return found.under(without_wrappers({key: key for key in found}))

    def original_on_disk(self) -> OnDisk:
        """The tensors of ``original_tensors``, each read when it is asked for.

        Raises:
            CheckpointError: As there, and as ``on_disk``.
        """
        found = self.on_disk()
        return found.under({key: key for key in self._theirs(found)})


def _layer_counts(config: Any, key: str = "") -> Iterator[int]:
    """Every number in a configuration that counts layers, by its name."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _layer_counts(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from _layer_counts(value, key)
    elif isinstance(config, int) and _LAYERS.search(key):
        yield config


def without_wrappers(tensors: dict[str, T]) -> dict[str, T]:
    """Tensors, or what stands for them, without the prefixes of distributed training and of ``torch.compile``.

    There may be several of them, in any order.
    """
    while tensors and (shared := next((p for p in _WRAPPERS if all(key.startswith(p) for key in tensors)), None)):
        tensors = {key.removeprefix(shared): tensor for key, tensor in tensors.items()}
    return tensors


def check_patches(resolution: int, patch: int) -> None:
    """Refuse a resolution that patches do not cover.

    Raises:
        CheckpointError: It is not a multiple of the patch size, and the message names the nearest one; or there is no
            such patch.
    """
    if patch < 1:
        raise CheckpointError(f"patches of {patch} pixels cannot be: the model's configuration is wrong.")
    if resolution % patch:
        near = max(patch, round(resolution / patch) * patch)
        raise CheckpointError(
            f"resolution {resolution} is not a multiple of the model's patch size {patch}; nearest: {near}."
        )
