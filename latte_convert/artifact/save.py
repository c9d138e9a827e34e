"""Write a hybrid as it is in memory, and prove it by building it again before the directory appears.

Where the weights in memory are still those of the source they are written under the source's own keys and dtypes, so
that ``restore`` is exact. Where they were trained, cast or otherwise changed, what is in memory is written.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from latte_convert.artifact.adapter import STEM
from latte_convert.artifact.card import Measured, write_card
from latte_convert.artifact.check import check_probe, open_source
from latte_convert.artifact.files import atomic_directory, check_target, visible, write_json
from latte_convert.artifact.load import open_artifact
from latte_convert.artifact.manifest import Manifest
from latte_convert.artifact.probe import renewed_probe
from latte_convert.artifact.record import Record, recorded
from latte_convert.artifact.tensors import digest, same_bytes, write_tensors
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.mark import CONFIG, mark_config
from latte_convert.checkpoints.rebuild import is_rebuilt, own_tensors, write_model
from latte_convert.checkpoints.resolve import resolve
from latte_convert.checkpoints.snapshot import check_unchanged
from latte_convert.data.feed import anchor
from latte_convert.environment import library_versions, tool_version
from latte_convert.errors import CheckpointError, IntegrityError
from latte_convert.names import CARD, MANIFEST, OFFLOADED, ORIGINAL, is_mark, is_ours
from latte_convert.reading import sha256_file
from latte_convert.wording import some

Describe = Callable[[Path, str], Sequence[Measured]]


def save(model: nn.Module, out: str | Path, *, overwrite: bool = False, adapter: bool = False) -> Path:
    """Save a hybrid: what ``convert`` or ``load`` returned, trained or cast since, or a copy of it.

    Args:
        model: The hybrid; wrappers without tensors of their own (``DataParallel``, ``torch.compile``) may be around it.
        out: Directory to create.
        overwrite: Replace an existing artifact; it stays until the new one is complete.
        adapter: Write only what was converted, beside a pinned reference to the source; ``load`` finds or fetches it.

    Returns:
        ``out``.

    Raises:
        CheckpointError: ``model`` is no hybrid, or cannot be built again from a directory; or the checkpoint that it
            was converted from has changed since; or an adapter has no source to point to, or other weights than it.
        OutputError: ``out`` exists and ``overwrite`` is off, or it cannot be written.
    """
    return save_artifact(model, Path(out), overwrite=overwrite, adapter=adapter)


def save_artifact(
    model: nn.Module,
    out: Path,
    *,
    overwrite: bool = False,
    adapter: bool = False,
    protect: Iterable[Path] = (),
    describe: Describe | None = None,
) -> Path:
    """Save a hybrid; see ``save``.

    Args:
        model: The hybrid.
        out: Directory to create.
        overwrite: Replace an existing artifact.
        adapter: Write only what was converted.
        protect: What must survive besides the source.
        describe: Adds what was measured, and returns what the model card shows of it; it gets the directory in the
            making and the artifact's fingerprint.
    """
    hybrid, record = recorded(model)
    protected = [*protect, *record.protected(out)]
    check_target(out, overwrite=overwrite, protect=protected)
    if record.manifest.module is None:
        is_rebuilt(hybrid)
    if adapter:
        record = record.as_adapter()
    tensors = kernel_tensors(hybrid) if adapter else hybrid.state_dict()
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    check_target(out, overwrite=overwrite, needed_bytes=int(size * 1.05) + (1 << 20), protect=protected)
    with atomic_directory(out, overwrite=overwrite) as directory, _evaluating(hybrid):
        manifest = _write(hybrid, record, directory)
        write_card(directory, manifest, describe(directory, manifest.fingerprint) if describe else ())
        written = {MANIFEST, *manifest.files}
        results = {name: sha256_file(directory / name) for name in visible(directory) if name not in written}
        manifest = manifest.model_copy(update={"results": results})
        write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
    return out


def copy_files(files: Mapping[str, Path], directory: Path) -> list[str]:
    """Copy files byte for byte into a directory, by their names there; returns the names."""
    for name, source in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, directory / name)
    return list(files)


def kernel_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of all converted sites of a model, under the keys they have in a checkpoint."""
    kernels = ((key, value) for key, value in model.state_dict().items() if is_ours(key) and not is_mark(key))
    return {key: value.detach().cpu() for key, value in kernels}


@dataclass(frozen=True)
class _Content:
    """One way of writing a hybrid's own weights.

    Attributes:
        weights: Whose they are, for the manifest.
        tensors: Them, under the keys of the file.
        files: What is copied beside them, by name.
        stem: Under which name the library keeps weights.
    """

    weights: Literal["source", "in memory"]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Path]
    stem: str


def _write(hybrid: nn.Module, record: Record, directory: Path) -> Manifest:
    """Write the source's weights if they are those in memory, else those in memory; either is proven."""
    probe = record.manifest.probe and renewed_probe(hybrid, record.manifest.probe)
    # Within the directory in the making, which the next run removes where this one is killed.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".") as scratch:
        for content in _contents(hybrid, record, Path(scratch)):
            manifest = _fill(directory, content, hybrid, record.manifest.model_copy(update={"probe": probe}), record)
            changed = _unlike(hybrid, directory, manifest, record)
            if record.at_hand is not None and record.snapshot:
                check_unchanged(record.at_hand, record.snapshot)
            if not changed:
                return manifest
            if manifest.base is not None:
                break
            for path in directory.iterdir():
                if path != Path(scratch):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    raise CheckpointError(
        f"this {type(hybrid).__name__} cannot be saved: built again from the directory, it differs from the model in "
        f"memory ({some(changed)}). Nothing was written."
        + (" An adapter has no place for weights that are not the source's: save it whole." if manifest.base else "")
    )


def _contents(hybrid: nn.Module, record: Record, scratch: Path) -> Iterator[_Content]:
    source = record.at_hand
    if source is not None:
        offloaded = OFFLOADED in hybrid.__dict__
        tensors = source.original_on_disk() if offloaded else source.original_tensors()
        yield _Content(record.manifest.weights, tensors, _sidecars(source), source.weights_stem)
        if offloaded:
            return  # they are in no other place
    kept = _sidecars(source) if source is not None else {}
    if record.manifest.module is None and is_rebuilt(hybrid):
        write_model(hybrid, own_tensors(hybrid), scratch)
        written = resolve(scratch)
        # The configuration is that of the model in memory; tokenizer, processor and licence are the source's.
        files = {**kept, **_sidecars(written)}
        yield _Content("in memory", written.original_tensors(), files, written.weights_stem)
    elif source is None and record.source is not None:
        raise CheckpointError(
            f"{record.source.path} is gone, and a {type(hybrid).__name__} cannot be built without the configuration "
            "that was there: put it back to save the hybrid."
        )
    else:
        yield _Content("in memory", own_tensors(hybrid), kept, source.weights_stem if source else "model")


def _sidecars(source: Checkpoint) -> dict[str, Path]:
    return {name: source.sidecar(name) for name in source.sidecars()}


def _fill(directory: Path, content: _Content, hybrid: nn.Module, draft: Manifest, record: Record) -> Manifest:
    """Write one content and the manifest that goes with it."""
    kernels = kernel_tensors(hybrid)
    if draft.base is not None:
        names = write_tensors(kernels, directory, STEM) if kernels else []
    else:
        names = _set_apart(copy_files(content.files, directory), directory, draft)
        names += write_tensors(ChainMap(kernels, content.tensors), directory, content.stem)  # type: ignore[arg-type]
    manifest = draft.model_copy(
        update={
            "tool_version": tool_version(),
            "library_versions": library_versions(),
            "source": draft.source.model_copy(update={"tensors_sha256": digest(content.tensors)}),
            "weights": content.weights,
            "files": {name: sha256_file(directory / name) for name in sorted(names)},
            "results": {},
        }
    )
    write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def _set_apart(names: list[str], directory: Path, draft: Manifest) -> list[str]:
    """Keep as the source had it what the artifact has another version of: the model card, and a marked configuration.

    Returns:
        The names of all files now.
    """
    marked = draft.source.library == "transformers"
    apart = [name for name in names if name == CARD or (marked and name == CONFIG)]
    for name in apart:
        (directory / ORIGINAL).mkdir(exist_ok=True)
        (directory / name).rename(directory / ORIGINAL / name)
    if CONFIG in apart:
        shutil.copyfile(directory / ORIGINAL / CONFIG, directory / CONFIG)
        mark_config(directory / CONFIG)
    return [*(name for name in names if name != CARD), *(f"{ORIGINAL}/{name}" for name in apart)]


def _unlike(hybrid: nn.Module, directory: Path, manifest: Manifest, record: Record) -> list[str]:
    """What of a hybrid is not the same when it is built from a directory: names of tensors, or an error's text."""
    module = manifest.module
    if module is not None and module.factory is None:  # only its owner can build it: what was written is compared
        stored = open_source(directory, manifest).read_tensors()
        return _changed({**own_tensors(hybrid), **kernel_tensors(hybrid)}, stored)
    try:
        trusted = record.source is not None and record.source.trust_remote_code
        offloaded = hybrid.__dict__.get(OFFLOADED)
        artifact = open_artifact(
            directory,
            trust_remote_code=trusted,
            allow_import=True,
            device=str(anchor(hybrid).device),
            offload=offloaded and offloaded.directory,
        )
    except (CheckpointError, IntegrityError) as error:
        return [str(error)]
    artifact.convert()
    changed = _changed(_state(hybrid), _state(artifact.model))
    if not changed:
        try:
            check_probe(artifact.model, manifest, directory)
        except IntegrityError:
            return ["its answer to a probe"]
    return changed


def _state(model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors of a model's state dict, those on disk read when they are asked for."""
    offloaded, state = model.__dict__.get(OFFLOADED), model.state_dict()
    return ChainMap(offloaded.weights, state) if offloaded else state


def _changed(memory: Mapping[str, Tensor], rebuilt: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that only one has, or that hold other bytes."""
    unequal = {key for key in memory.keys() & rebuilt.keys() if not same_bytes(memory[key], rebuilt[key])}
    return sorted(unequal | (memory.keys() ^ rebuilt.keys()))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A model in eval mode for a time, each of its modules as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
