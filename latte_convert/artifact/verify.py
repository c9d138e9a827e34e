"""Check an artifact without any data, and take the exact original out of it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from latte_convert.artifact.check import (
    Verification,
    artifact_directory,
    check_files,
    check_probe,
    open_source,
    original_tensors,
)
from latte_convert.artifact.files import atomic_directory, check_outside, check_target
from latte_convert.artifact.load import open_artifact
from latte_convert.artifact.manifest import Manifest
from latte_convert.artifact.save import copy_files
from latte_convert.artifact.tensors import write_tensors
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.names import ORIGINAL


def verify(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    trust_remote_code: bool = False,
    allow_import: bool = False,
    base: str | Path | None = None,
) -> Verification:
    """Check every file, strict reload and the recorded probe of an artifact.

    Args:
        directory: An artifact.
        model: As for ``load``.
        trust_remote_code: As for ``load``.
        allow_import: As for ``load``.
        base: As for ``load``.

    Raises:
        CheckpointError: There is no such directory; or the module it is of was not given.
        IntegrityError: Something is not as the manifest says.
    """
    path = artifact_directory(directory)
    manifest = check_files(path)
    artifact = open_artifact(
        path, model=model, trust_remote_code=trust_remote_code, allow_import=allow_import, base=base
    )
    original_tensors(artifact.source, manifest)
    artifact.convert()
    difference, tolerance = check_probe(artifact.model, manifest, path)
    return Verification(
        len(manifest.files), len(manifest.results), manifest.source.tensors_sha256, difference, tolerance
    )


def restore(directory: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write the exact original of an artifact.

    Args:
        directory: An artifact.
        out: Directory to create.
        overwrite: Replace an existing directory.

    Raises:
        IntegrityError: The original's tensors are not what they were.
        OutputError: ``out`` exists, or cannot be written.
    """
    path, target = artifact_directory(directory), Path(out)
    check_outside(target, path)
    manifest = check_files(path)
    source = open_source(path, manifest)
    originals = original_tensors(source, manifest)
    sidecars = _sidecars(path, manifest, source)
    known = [*manifest.files, *sidecars]
    protect = [path] if manifest.base is None else [path, source.path]
    size = sum(t.numel() * t.element_size() for t in originals.values())
    check_target(target, overwrite=overwrite, needed_bytes=int(size * 1.05) + (1 << 20), protect=protect, known=known)
    with atomic_directory(target, overwrite=overwrite) as temporary:
        copy_files(sidecars, temporary)
        write_tensors(originals, temporary, source.weights_stem)
    return target


def _sidecars(path: Path, manifest: Manifest, source: Checkpoint) -> dict[str, Path]:
    """What lay beside the original's weights, by name: files of the artifact, or of an adapter's base."""
    if manifest.base is not None:
        return {name: source.sidecar(name) for name in source.sidecars()}
    weights = {file.name for file in source.weights}
    names = [name for name in manifest.files if name not in weights and not name.endswith(".safetensors.index.json")]
    apart = {name: path / name for name in names if name.startswith(f"{ORIGINAL}/")}
    files = {name: path / name for name in names if name not in apart}
    return files | {name.removeprefix(f"{ORIGINAL}/"): file for name, file in apart.items()}
