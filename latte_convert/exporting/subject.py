"""What is exported: a hybrid, or a plain checkpoint to compare it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import is_block_of
from latte_convert.artifact.check import artifact_directory, manifest_of_library
from latte_convert.artifact.load import open_artifact
from latte_convert.artifact.manifest import Manifest
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.resolve import resolve
from latte_convert.kernels.base import Kernel
from latte_convert.names import MANIFEST


@dataclass(frozen=True)
class Subject:
    """A model ready to be exported: float32, in eval mode, its sites converted.

    Attributes:
        source: The checkpoint, for its processors and files.
        model: The model.
        kernels: The kernel of each converted site, by name; empty for an original.
        towers: The tower of each of these sites.
        merging: The towers whose blocks merge tokens.
        resolution: Height and width of images that it is built for, or None for the checkpoint's own.
        min_tokens: With fewer keys than this, converted sites run exact attention.
        manifest: What an artifact records of itself; None for a plain checkpoint.
    """

    source: Checkpoint
    model: nn.Module
    kernels: Mapping[str, Kernel]
    towers: Mapping[str, str]
    merging: frozenset[str] = frozenset()
    resolution: int | None = None
    min_tokens: int = 0
    manifest: Manifest | None = None

    @property
    def name(self) -> str:
        """What the original is called."""
        return self.manifest.source.id if self.manifest else self.source.id


def open_subject(model: str | Path, *, resolution: int | None = None, trust_remote_code: bool = False) -> Subject:
    """Open an artifact, converted, or a checkpoint as it is.

    Args:
        model: A directory of ``latte convert``, or anything that ``resolve`` takes.
        resolution: Height and width of images in pixels; None for what the artifact records.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Raises:
        CheckpointError: There is no such model, or no library builds it.
        IntegrityError: An artifact is damaged.
    """
    path = Path(model).expanduser()
    if path.is_dir() and (path / MANIFEST).is_file():
        return _hybrid(artifact_directory(path), resolution, trust_remote_code)
    source = resolve(model, trust_remote_code=trust_remote_code)
    network, _ = source.instantiate(source.original_tensors(), resolution)
    return Subject(source, network.float(), {}, {}, resolution=resolution)


def _hybrid(path: Path, resolution: int | None, trust_remote_code: bool) -> Subject:
    manifest = manifest_of_library(path, "give it to torch.export or torch.onnx.export yourself")
    artifact = open_artifact(path, trust_remote_code=trust_remote_code)
    source, host = artifact.source, artifact.host
    own = manifest.recipe.get("resolution")
    if resolution not in (None, own) and source.library != "transformers":  # these are built for one size
        network, _ = source.instantiate(source.original_tensors(), resolution)
        host = Host.of(network)
    host.convert({**artifact.kernels, **artifact.merges}, min_tokens=manifest.min_tokens)
    sites = host.sites()
    towers = {site.name: site.tower for site in sites if site.name in artifact.kernels}
    merging = frozenset(site.tower for site in sites if is_block_of(artifact.merges, site.name))
    return Subject(
        source, host.model.float(), artifact.kernels, towers, merging, resolution or own, manifest.min_tokens, manifest
    )
