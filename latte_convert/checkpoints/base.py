"""A checkpoint on disk: what every library's kind of it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from latte_convert.checkpoints.weights import INDEX, SIDECARS, read_file
from latte_convert.errors import CheckpointError
from latte_convert.names import MANIFEST, is_ours, is_report
from latte_convert.wording import some

if TYPE_CHECKING:
    from torch import Tensor, nn

    from latte_convert.data.feed import Processor
    from latte_convert.data.samples import Modality


class Checkpoint(ABC):
    """A resolved checkpoint: where it is and what it holds. One subclass a library.

    Attributes:
        library: Name of the library that its class comes from.
        weights_stem: Under which name its library keeps weights, ``<stem>.safetensors``.
        id: What the user called it: a Hub id, or the absolute path.
        path: Its local directory.
        weights: The weight files, safetensors unless a pickle was allowed.
        revision: Commit of the Hub snapshot, or None.
        trust_remote_code: Whether Python code of the checkpoint may run.
    """

    library: ClassVar[str]
    weights_stem: ClassVar[str] = "model"

    def __init__(
        self,
        identifier: str,
        path: Path,
        weights: tuple[Path, ...],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.id = identifier
        self.path = path
        self.weights = weights
        self.revision = revision
        self.trust_remote_code = trust_remote_code

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

    @abstractmethod
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
                the model at that resolution.
        """

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
        model.load_state_dict(tensors, strict=False)
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
        theirs = {path for path in found if path.name not in {MANIFEST, *indices}}
        if self.is_artifact:
            theirs = {path for path in theirs if not is_report(path.name)}
        return sorted(path.relative_to(self.path).as_posix() for path in theirs)

    def read_tensors(self) -> dict[str, Tensor]:
        """All tensors under their own keys, ours included where it is an artifact; files are memory-mapped.

        Raises:
            CheckpointError: A file is damaged.
        """
        tensors: dict[str, Tensor] = {}
        for file in self.weights:
            tensors.update(read_file(file))
        strange = [str(t.dtype) for t in tensors.values() if t.is_floating_point() and t.itemsize < 2]
        if strange:
            raise CheckpointError(f"{self.id} holds quantised weights ({strange[0]}); give the unquantised checkpoint.")
        return tensors

    def original_tensors(self) -> dict[str, Tensor]:
        """The source's own tensors: all of them, or without ours where it is an artifact.

        Raises:
            CheckpointError: A file is damaged.
        """
        tensors = self.read_tensors()
        if not self.is_artifact and (taken := next(filter(is_ours, tensors), None)):
            raise CheckpointError(f"{self.id} has a tensor '{taken}': names of this form are for converted sites.")
        return {key: tensor for key, tensor in tensors.items() if not is_ours(key)}


def check_patches(resolution: int, patch: int) -> None:
    """Refuse a resolution that patches do not cover.

    Raises:
        CheckpointError: It is not a multiple of the patch size; the message names the nearest one.
    """
    if resolution % patch:
        near = max(patch, round(resolution / patch) * patch)
        raise CheckpointError(
            f"resolution {resolution} is not a multiple of the model's patch size {patch}; nearest: {near}."
        )
