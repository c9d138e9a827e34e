"""Write an artifact: the source's tensors and files as they are, our tensors, manifest and reports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from latte_convert.artifact.files import atomic_directory, check_target, sha256_file, write_json
from latte_convert.artifact.manifest import CalibrationRecord, Manifest, SiteRecord, SourceRecord
from latte_convert.artifact.probe import record_probe
from latte_convert.artifact.tensors import digest, write_tensors
from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.resolve import resolve
from latte_convert.environment import library_versions, tool_version
from latte_convert.errors import CheckpointError
from latte_convert.names import ATTRIBUTE, MANIFEST, REPORT, is_ours
from latte_convert.report.html import write_html

if TYPE_CHECKING:
    from latte_convert.opening import Job
    from latte_convert.report.schema import Report
    from latte_convert.selection.plan import Plan


def save_artifact(job: Job, plan: Plan, report: Report, out: Path, *, overwrite: bool = False) -> Report:
    """Write the artifact of a conversion.

    Args:
        job: The conversion, its model converted.
        plan: What became what.
        report: What was measured.
        out: Directory to create.
        overwrite: Replace an existing directory; it stays until the new one is complete.

    Returns:
        The report as it was written, with the artifact's fingerprint.

    Raises:
        OutputError: ``out`` exists and ``overwrite`` is off, or it cannot be written.
    """
    protect = protected_paths(job)
    check_target(out, overwrite=overwrite, protect=protect)
    with _source_of(job) as source:
        originals = source.original_tensors()
        ours = kernel_tensors(job.model)
        size = sum(t.numel() * t.element_size() for t in (*originals.values(), *ours.values()))
        check_target(out, overwrite=overwrite, needed_bytes=int(size * 1.05) + (1 << 20), protect=protect)
        with atomic_directory(out, overwrite=overwrite) as directory:
            sidecars = copy_files(source.path, source.sidecars(), directory)
            weights = write_tensors({**originals, **ours}, directory, source.weights_stem)
            manifest = _manifest(job, plan, report, originals, [*sidecars, *weights], directory)
            write_json(directory / MANIFEST, manifest.model_dump(mode="json"))
            report = report.model_copy(update={"artifact_fingerprint": manifest.fingerprint})
            write_json(directory / REPORT, report.model_dump(mode="json"))
            write_html(report, directory / "report.html")
    return report


def protected_paths(job: Job) -> list[Path]:
    """What no output may replace: the source checkpoint and the samples."""
    paths = [Path(samples.source).expanduser() for samples in job.samples if not samples.source.startswith("hf:")]
    return [*paths, *([job.source.path] if job.source else [])]


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
def _source_of(job: Job) -> Iterator[Checkpoint]:
    """The checkpoint on disk; a model given in memory is written to a temporary one first."""
    if job.source is not None:
        yield job.source
        return
    model: Any = job.model
    write = getattr(job.adapter, "write_checkpoint", None)
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


def _manifest(
    job: Job, plan: Plan, report: Report, originals: dict[str, Tensor], files: list[str], directory: Path
) -> Manifest:
    return Manifest(
        tool_version=tool_version(),
        library_versions=library_versions(),
        source=SourceRecord(
            id=report.source.id,
            revision=report.source.revision,
            library=report.source.library,
            model_class=report.source.model_class,
            sha256=report.source.sha256,
            tensors_sha256=digest(originals),
            unexpected_keys=list(job.unexpected_keys),
        ),
        recipe=report.recipe,
        calibration=CalibrationRecord(
            fingerprint=report.calibration.fingerprint,
            requested=report.calibration.requested,
            used=report.calibration.used,
            held_out=report.calibration.held_out,
            skipped=report.calibration.skipped,
        ),
        sites=[
            SiteRecord(
                name=site.name,
                kernel=plan.kernels[site.name],
                heads=site.heads,
                head_dim=site.head_dim,
                causal=site.causal,
                options=getattr(job.model.get_submodule(site.name), ATTRIBUTE).options,
            )
            for site in plan.converted
        ],
        min_tokens=plan.min_tokens,
        probe=record_probe(job.model, job.holdout),
        files={name: sha256_file(directory / name) for name in sorted(files)},
    )
