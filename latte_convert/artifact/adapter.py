"""Adapters: artifacts that hold only what was converted, and point to the base it belongs to."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from latte_convert.artifact.manifest import BaseRecord, Manifest
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.resolve import resolve
from latte_convert.checkpoints.snapshot import take_snapshot
from latte_convert.checkpoints.weights import read_file
from latte_convert.errors import CheckpointError, IntegrityError, UsageError
from latte_convert.names import CARD
from latte_convert.reading import sha256_file

STEM = "adapter"
"""Under which name an adapter keeps the tensors of its kernels."""


def record_base(source: Checkpoint | None) -> BaseRecord:
    """What an adapter keeps of its base: where it is, and what its files are.

    Raises:
        CheckpointError: It cannot be found again: a model given in memory, or pickled weights.
    """
    if source is None:
        raise CheckpointError(
            "an adapter points to the checkpoint that it belongs to, and this model has none that is still there: save "
            "it whole."
        )
    if pickled := next((file for file in source.weights if file.suffix != ".safetensors"), None):
        raise CheckpointError(f"an adapter's base has safetensors files, and {pickled} is a pickle: save it whole.")
    files = {name: digest for name, digest in take_snapshot(source).items() if name != CARD}
    return BaseRecord(id=source.id, revision=source.revision, files=files)


def open_base(path: Path, manifest: Manifest, given: str | Path | None, trust_remote_code: bool) -> Checkpoint:
    """The base of an adapter: the one given, or the one recorded, fetched from the Hub where it is of it.

    Raises:
        UsageError: One was given for an artifact that is whole.
        CheckpointError: It is gone.
        IntegrityError: It has changed.
    """
    record = manifest.base
    if record is None:
        raise UsageError(f"{path} is no adapter: it holds its model, so leave out the base.")
    named = record.id.startswith("open_clip:") and not record.id.startswith("open_clip:hf-hub:")
    revision = record.revision if given is None and not named and "@" not in record.id else None
    try:
        source = resolve(given or record.id, revision=revision, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise CheckpointError(
            f"the base of the adapter {path} is not there: {error} Put it back, or give another copy: "
            "latte_convert.load(adapter, base=…), latte merge ADAPTER --base MODEL --out DIR."
        ) from None
    places = {file.name: file for file in source.weights}
    for name, expected in record.files.items():
        file = places.get(name, source.sidecar(name))
        if not file.is_file() or sha256_file(file) != expected:
            raise IntegrityError(
                f"the base of the adapter {path}, {given or record.id}, has changed: its {name} is not what was "
                "converted. Get the version that it was made from, or convert again."
            )
    return source


def kernel_files(path: Path, manifest: Manifest) -> list[Path]:
    """The files of an adapter that hold its kernels; none where they have no tensors, as those of near_far."""
    return [path / name for name in sorted(manifest.files) if name.endswith(".safetensors")]


def read_adapter(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of an adapter's kernels, under the keys they have in a whole artifact.

    Raises:
        IntegrityError: A file is missing or damaged.
    """
    try:
        return {key: tensor for file in kernel_files(path, manifest) for key, tensor in read_file(file).items()}
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None
