"""What is checked of an artifact: its files against the manifest, the original's tensors, the answer to the probe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from latte_convert.artifact.adapter import open_base
from latte_convert.artifact.files import visible
from latte_convert.artifact.locks import locked, recover
from latte_convert.artifact.manifest import Manifest, read_manifest
from latte_convert.artifact.probe import probe_difference
from latte_convert.artifact.results import settle
from latte_convert.artifact.tensors import digest
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.module import ModuleCheckpoint
from latte_convert.checkpoints.resolve import resolve
from latte_convert.checkpoints.weights import download, leads_out
from latte_convert.errors import CheckpointError, IntegrityError
from latte_convert.names import HUB_ID, MANIFEST
from latte_convert.reading import MOST_BYTES, is_utf8, sha256_file
from latte_convert.wording import some

TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""Largest accepted difference of the probe by dtype, in units of the output's root mean square. Machines differ in
the order of their sums; a wrong kernel, a lost scale or a changed weight is off by far more."""


@dataclass(frozen=True)
class Verification:
    """What ``verify`` checked.

    Attributes:
        files: Number of files of the checkpoint whose hash is right.
        results: Number of files of results (report, bench, eval) whose hash is right.
        tensors_sha256: Digest of the original's tensors, equal to the source's.
        probe_difference: Difference of the reloaded hybrid from the recorded answer, or None without a probe.
        tolerance: What was accepted.
    """

    files: int
    results: int
    tensors_sha256: str
    probe_difference: float | None
    tolerance: float | None


def artifact_directory(directory: str | Path) -> Path:
    """The directory of an artifact; one that a killed run had only set aside is put back.

    Args:
        directory: A directory, or the Hub id of an artifact that was pushed: an existing path wins.

    Raises:
        CheckpointError: There is none.
    """
    try:
        path = Path(directory).expanduser()
        if not is_utf8(path.absolute()):
            raise CheckpointError(f"{str(path.absolute())!a} is not UTF-8, and its files cannot be read: rename it.")
        if not path.is_dir():
            recover(path.absolute())
        if path.is_dir():
            return path
        if isinstance(directory, str) and re.fullmatch(HUB_ID, directory):
            return download(directory, patterns=["*"])
    except (OSError, ValueError, RuntimeError) as error:  # no name of a file, or no such home
        raise CheckpointError(f"'{directory}' cannot be an artifact: {error}.") from None
    raise CheckpointError(f"there is no artifact at '{directory}'.")


def manifest_of_library(path: Path, instead: str) -> Manifest:
    """The manifest of an artifact whose model a library builds, and has inputs for.

    Args:
        path: The artifact.
        instead: What to do with another model once it is loaded.

    Raises:
        CheckpointError: Only its owner's code builds it.
        IntegrityError: The manifest is damaged.
    """
    manifest = read_manifest(path)
    if manifest.module is not None:
        raise CheckpointError(
            f"{path} holds a {manifest.source.model_class} that only your code builds and has inputs for: load it with "
            f"latte_convert.load(directory, model=…) and {instead}."
        )
    return manifest


def check_files(path: Path) -> Manifest:
    """Compare every file of an artifact with its manifest, both ways; hidden files are no part of it.

    Returns:
        The manifest.

    Raises:
        IntegrityError: A file is missing, changed, or not named.
    """
    settle(path)
    with locked(path / MANIFEST):
        manifest = read_manifest(path)
        recorded = {**manifest.results, **manifest.files}
        for name, expected in recorded.items():
            file = path / name
            if not file.is_file() or leads_out(file, path):
                raise IntegrityError(f"{path}: '{name}' is missing.")
            if not _plausible(file) or sha256_file(file) != expected:
                raise IntegrityError(f"{path}: '{name}' is not the file that was saved (its hash differs).")
    extra = sorted(set(visible(path)) - {MANIFEST, *recorded})
    if extra:
        raise IntegrityError(
            f"{path} holds files that its manifest does not name: {some(extra, 5)}. Remove them, or keep them "
            "elsewhere; 'latte report' records what 'latte bench' and 'latte eval' wrote."
        )
    return manifest


def _plausible(file: Path) -> bool:
    """Whether a file may be what was saved, by its size; a hole of many gigabytes would take minutes to hash."""
    if file.suffix != ".safetensors":
        return file.stat().st_size <= MOST_BYTES
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy", backend="pread"):  # its header says how long it is
            return True
    except (SafetensorError, OSError):
        return False


def open_source(
    path: Path,
    manifest: Manifest,
    *,
    trust_remote_code: bool = False,
    module: nn.Module | None = None,
    base: str | Path | None = None,
) -> Checkpoint:
    """The checkpoint inside an artifact, or the base of an adapter.

    Args:
        path: The artifact.
        manifest: Its manifest.
        trust_remote_code: Whether Python code that comes with it may run.
        module: What to fill, where no library builds it.
        base: Another copy of an adapter's base.

    Raises:
        IntegrityError: It cannot be used.
        CheckpointError: An adapter's base is gone.
    """
    if manifest.base is not None or base is not None:
        return open_base(path, manifest, base, trust_remote_code)
    try:
        if manifest.module is not None:
            return ModuleCheckpoint(path, manifest.module.kind, module)
        return resolve(path, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None


def original_tensors(source: Checkpoint, manifest: Manifest) -> dict[str, Tensor]:
    """The original's tensors inside an artifact.

    Raises:
        IntegrityError: They are not those that were converted.
    """
    try:
        tensors = source.original_tensors()
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None
    if digest(tensors) != manifest.source.tensors_sha256:
        raise IntegrityError(
            f"{source.path}: the original's tensors are not those recorded in {MANIFEST}; the artifact was changed."
        )
    return tensors


def check_probe(model: nn.Module, manifest: Manifest, path: Path) -> tuple[float | None, float | None]:
    """Compare a hybrid's answer to the recorded probe with the recorded one.

    Returns:
        The difference, and what was accepted; None without a probe.

    Raises:
        IntegrityError: It answers differently.
    """
    if manifest.probe is None:
        return None, None
    difference = probe_difference(model, manifest.probe)
    tolerance = TOLERANCE[str(next(model.parameters()).dtype).removeprefix("torch.")]
    if not difference <= tolerance:
        raise IntegrityError(
            f"{path}: the reloaded hybrid answers the probe differently than at conversion (by {difference:.2g} of "
            f"the output's scale, {tolerance:g} accepted). Library versions then: "
            + ", ".join(f"{name} {version}" for name, version in manifest.library_versions.items())
        )
    return difference, tolerance
