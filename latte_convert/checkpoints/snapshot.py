"""What the files of a checkpoint were when it was opened, so that what is saved is what was converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from latte_convert.errors import CheckpointError
from latte_convert.reading import MOST_BYTES, sha256_file

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint


def take_snapshot(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, its weights and what lies beside them, by name.

    Raises:
        CheckpointError: A file beside the weights is so large that it cannot belong to them.
    """
    places = {path.name: path for path in checkpoint.weights}
    places |= {name: checkpoint.sidecar(name) for name in checkpoint.sidecars()}
    for name in checkpoint.sidecars():
        if (size := places[name].stat().st_size) > MOST_BYTES:
            raise CheckpointError(
                f"{places[name]} has {size / 1e6:,.0f} MB, too much for a file beside the weights: move it away."
            )
    return {name: sha256_file(path) for name, path in sorted(places.items())}


def check_unchanged(checkpoint: Checkpoint, snapshot: Mapping[str, str]) -> None:
    """Compare the files of a checkpoint with a snapshot of them.

    Raises:
        CheckpointError: A file was changed, removed or added since; the message names it.
    """
    try:
        now = take_snapshot(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read any more: {error.strerror}.") from None
    changed = sorted(name for name in now.keys() | snapshot.keys() if now.get(name) != snapshot.get(name))
    if changed:
        raise CheckpointError(
            f"{checkpoint.path / changed[0]} was changed since the conversion began, so the hybrid belongs to neither "
            "version. Convert again with nothing writing there, or move it away to save what is in memory."
        )
