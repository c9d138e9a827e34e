"""Write an artifact: the source's tensors and files as they are, our tensors, manifest and reports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from latte_convert.artifact.files import atomic_directory, check_target, sha256_file, visible, write_json
from latte_convert.artifact.manifest import CalibrationRecord, Manifest, SiteRecord, SourceRecord
from latte_convert.artifact.probe import record_probe
from latte_convert.artifact.tensors import digest, write_tensors
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.samples import fingerprint
from latte_convert.environment import library_versions, tool_version
from latte_convert.errors import CheckpointError
from latte_convert.names import ATTRIBUTE, MANIFEST, is_ours

if TYPE_CHECKING:
    from latte_convert.selection.plan import Plan
    from latte_convert.task import Task


def save_artifact(
    task: Task,
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    describe: Callable[[Path, str], None] | None = None,
) -> None:
    """Write the artifact of a conversion.

    Args:
        task: What was converted; its model is the hybrid by now.
        plan: What became what.
        out: Directory to create.
        overwrite: Replace an existing directory; it stays until the new one is complete.
        describe: Adds what was measured; it gets the directory in the making and the artifact's fingerprint.

    Raises:
        OutputError: ``out`` exists and ``overwrite`` is off, or it cannot be written.
    """
    check_target(out, overwrite=overwrite, protect=task.protected)
    with _source_of(task) as source:
        originals = source.original_tensors()
        ours = kernel_tensors(task.host.model)
        size = sum(t.numel() * t.element_size() for t in (*originals.values(), *ours.values()))
        check_target(out, overwrite=overwrite, needed_bytes=int(size * 1.05) + (1 << 20), protect=task.protected)
        with atomic_directory(out, overwrite=overwrite) as directory:
            sidecars = copy_files(source.path, source.sidecars(), directory)
            weights = write_tensors({**originals, **ours}, directory, source.weights_stem)
            manifest = _manifest(task, plan, originals, [*sidecars, *weights], directory)
            if describe is not None:
                describe(directory, manifest.fingerprint)
            results = {name: sha256_file(directory / name) for name in visible(directory) if name not in manifest.files}
            manifest = manifest.model_copy(update={"results": results})
            write_json(directory / MANIFEST, manifest.model_dump(mode="json"))


def copy_files(source: Path, names: Iterable[str], directory: Path) -> list[str]:
    """Copy files byte for byte, by their names relative to ``source``; returns the names."""
    names = list(names)
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, directory / name)
    return names


def kernel_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of all converted sites of a model, under the keys they have in a checkpoint."""
    return {key: value.detach().cpu() for key, value in model.state_dict().items() if is_ours(key)}


@contextmanager
def _source_of(task: Task) -> Iterator[Checkpoint]:
    """The checkpoint on disk; a model given in memory is written to a temporary one first."""
    if task.source is not None:
        yield task.source
        return
    model: Any = task.host.model
    write = getattr(task.host.adapter, "write_checkpoint", None)
    if write is None and not hasattr(model, "save_pretrained"):
        raise CheckpointError(
            f"a {type(model).__name__} that was given in memory cannot be rebuilt from a directory: keep the hybrid's "
            "own result.model.state_dict(), or convert the checkpoint's directory instead of the loaded model."
        )
    with tempfile.TemporaryDirectory() as temporary:
        state = {key: value for key, value in model.state_dict().items() if not is_ours(key)}
        if write is not None:
            write(model, state, Path(temporary))
        else:
            model.save_pretrained(temporary, state_dict=state)
        yield resolve(temporary)


def _manifest(task: Task, plan: Plan, originals: dict[str, Tensor], files: list[str], directory: Path) -> Manifest:
    source, samples = task.source, task.samples
    return Manifest(
        tool_version=tool_version(),
        library_versions=library_versions(),
        source=SourceRecord(
            id=source.id if source else "in memory",
            revision=source.revision if source else None,
            library=task.host.adapter.name,
            model_class=type(task.host.model).__name__,
            sha256={path.name: sha256_file(path) for path in source.weights} if source else {},
            tensors_sha256=digest(originals),
            unexpected_keys=list(task.unexpected_keys),
        ),
        recipe=task.recipe.model_dump(mode="json"),
        calibration=CalibrationRecord(
            fingerprint=fingerprint(samples),
            requested=sum(s.requested for s in samples) or len(task.fitting) + len(task.holdout),
            used=len(task.fitting),
            held_out=len(task.holdout),
            skipped=[{"id": skip.id, "reason": skip.reason} for s in samples for skip in s.skipped],
        ),
        sites=[
            SiteRecord(
                name=site.name,
                kernel=plan.kernels[site.name],
                heads=site.heads,
                head_dim=site.head_dim,
                causal=site.causal,
                options=getattr(task.host.model.get_submodule(site.name), ATTRIBUTE).options,
            )
            for site in plan.converted
        ],
        min_tokens=plan.min_tokens,
        probe=record_probe(task.host.model, task.holdout),
        files={name: sha256_file(directory / name) for name in sorted(files)},
    )
