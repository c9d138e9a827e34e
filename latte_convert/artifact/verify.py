"""Check an artifact without any data, and take the exact original out of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from latte_convert.artifact.files import atomic_directory, check_target, sha256_file
from latte_convert.artifact.load import load
from latte_convert.artifact.manifest import Manifest, read_manifest
from latte_convert.artifact.probe import probe_difference
from latte_convert.artifact.save import copy_files
from latte_convert.artifact.tensors import digest, write_tensors
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import CheckpointError, IntegrityError
from latte_convert.names import MANIFEST
from latte_convert.wording import some

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""Largest accepted difference of the probe by dtype, in units of the output's root mean square. Machines differ in
the order of their sums; a wrong kernel, a lost scale or a changed weight is off by far more."""


@dataclass(frozen=True)
class Verification:
    """What ``verify`` checked.

    Attributes:
        files: Number of files whose hash is right.
        tensors_sha256: Digest of the original's tensors, equal to the source's.
        probe_difference: Difference of the reloaded hybrid from the recorded answer, or None without a probe.
        tolerance: What was accepted.
    """

    files: int
    tensors_sha256: str
    probe_difference: float | None
    tolerance: float | None


def verify(directory: str | Path, *, trust_remote_code: bool = False) -> Verification:
    """Check hashes, strict reload and the recorded probe of an artifact.

    Raises:
        CheckpointError: There is no such directory.
        IntegrityError: Something is not as the manifest says.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"there is no artifact at '{directory}'.")
    manifest = read_manifest(path)
    _check_files(path, manifest)
    model = load(path, trust_remote_code=trust_remote_code)
    _originals(path, manifest)
    difference = tolerance = None
    if manifest.probe is not None:
        difference = probe_difference(model, manifest.probe)
        tolerance = TOLERANCE[str(next(model.parameters()).dtype).removeprefix("torch.")]
        if not difference <= tolerance:
            raise IntegrityError(
                f"{path}: the reloaded hybrid answers the probe differently than at conversion (by {difference:.2g} of "
                f"the output's scale, {tolerance:g} accepted). Library versions then: "
                + ", ".join(f"{name} {version}" for name, version in manifest.library_versions.items())
            )
    return Verification(len(manifest.files), manifest.source.tensors_sha256, difference, tolerance)


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
    path, target = Path(directory).expanduser(), Path(out)
    if not path.is_dir():
        raise CheckpointError(f"there is no artifact at '{directory}'.")
    manifest = read_manifest(path)
    source = _check_files(path, manifest)
    originals = _originals(path, manifest)
    weights = {file.name for file in source.weights}
    sidecars = [name for name in manifest.files if name not in weights and not name.endswith(".safetensors.index.json")]
    size = sum(t.numel() * t.element_size() for t in originals.values())
    check_target(
        target, overwrite=overwrite, needed_bytes=int(size * 1.05) + (1 << 20), protect=[path], known=manifest.files
    )
    with atomic_directory(target, overwrite=overwrite) as temporary:
        copy_files(path, sidecars, temporary)
        write_tensors(originals, temporary, source.weights_stem)
    return target


def _check_files(path: Path, manifest: Manifest) -> Checkpoint:
    """Compare the files of an artifact with its manifest, both ways."""
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file() or file.is_symlink():
            raise IntegrityError(f"{path}: '{name}' is missing.")
        if sha256_file(file) != expected:
            raise IntegrityError(f"{path}: '{name}' is not the file that was saved (its hash differs).")
    try:
        source = resolve(path)
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None
    extra = sorted({*source.sidecars(), *(file.name for file in source.weights)} - set(manifest.files))
    if extra:
        raise IntegrityError(f"{path} holds files that its manifest does not name: {some(extra, 5)}.")
    return source


def _originals(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    try:
        tensors = resolve(path).original_tensors()
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None
    if digest(tensors) != manifest.source.tensors_sha256:
        raise IntegrityError(
            f"{path}: the original's tensors are not those recorded in {MANIFEST}; the artifact was changed."
        )
    return tensors
