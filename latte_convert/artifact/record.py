"""What a hybrid carries with it, so that it can be saved wherever it came from: its manifest to be, and its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from latte_convert.adapters.convert import Applied, is_hybrid
from latte_convert.artifact.adapter import record_base
from latte_convert.artifact.manifest import (
    CalibrationRecord,
    Manifest,
    MergeRecord,
    ModuleRecord,
    SiteRecord,
    SourceRecord,
)
from latte_convert.artifact.probe import record_probe
from latte_convert.data.samples import fingerprint
from latte_convert.environment import library_versions, tool_version
from latte_convert.errors import CheckpointError
from latte_convert.names import ATTRIBUTE, RECORD

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.selection.plan import Plan
    from latte_convert.task import Task


@dataclass(frozen=True)
class Record:
    """What is known of a hybrid besides its tensors. Copies of the model share it.

    Attributes:
        manifest: As it will be written, without files and hashes: those are known when it is.
        source: The checkpoint that the model was read from, an artifact's own included; None for a model that was
            given in memory.
        snapshot: SHA-256 of every file of a source that was converted, as it was opened.
    """

    manifest: Manifest
    source: Checkpoint | None = None
    snapshot: Mapping[str, str] = field(default_factory=dict)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Record:
        return self

    @property
    def at_hand(self) -> Checkpoint | None:
        """The source, if its files are still there."""
        source = self.source
        there = source is not None and all(file.is_file() for file in source.weights)
        return source if there else None

    def as_adapter(self) -> Record:
        """The record of the same hybrid, to be saved beside a reference to its source.

        Raises:
            CheckpointError: It has none that can be found again.
        """
        return replace(self, manifest=self.manifest.model_copy(update={"base": record_base(self.at_hand)}))

    def protected(self, out: Path) -> list[Path]:
        """What saving to ``out`` must not replace: the source, unless it is the artifact that is being renewed."""
        source = self.source
        if source is None or (source.is_artifact and source.path.resolve() == out.resolve()):
            return []
        return [source.path]


def record_conversion(task: Task, plan: Plan) -> None:
    """Have a model that has just been converted carry its record."""
    source, samples, model = task.source, task.samples, task.host.model
    manifest = Manifest(
        tool_version=tool_version(),
        library_versions=library_versions(),
        source=SourceRecord(
            id=source.id if source else "in memory",
            revision=source.revision if source else None,
            library=task.host.adapter.name if task.rebuilt else "torch",
            model_class=type(model).__name__,
            sha256=task.weights_sha256,
            tensors_sha256="",
            unexpected_keys=list(task.unexpected_keys),
        ),
        weights="source" if source else "in memory",
        module=None if task.rebuilt else _module_record(task),
        recipe=task.recipe.resolved().model_dump(mode="json"),
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
                biased=site.biased,
                options=getattr(model.get_submodule(site.name), ATTRIBUTE).options,
            )
            for site in plan.converted
        ],
        merges=[MergeRecord(name=name, share=share) for name, share in plan.merges.items()],
        min_tokens=plan.min_tokens,
        probe=record_probe(model, task.holdout),
        files={},
    )
    model.__dict__[RECORD] = Record(manifest, source, task.snapshot)


def _module_record(task: Task) -> ModuleRecord:
    return ModuleRecord(
        kind=_import_path(type(task.host.model)), factory=task.factory, attention=[site.name for site in task.sites]
    )


def _import_path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def record_loading(model: nn.Module, manifest: Manifest, source: Checkpoint, applied: Applied) -> None:
    """Have a model that was converted from an artifact carry the artifact's record, until that is undone."""
    model.__dict__[RECORD] = Record(manifest.model_copy(update={"base": None}), source)
    applied.on_undo(lambda: model.__dict__.pop(RECORD, None) and None)


def recorded(model: nn.Module) -> tuple[nn.Module, Record]:
    """The hybrid that a model is, without wrappers that hold nothing of their own, and its record.

    Raises:
        CheckpointError: It is no hybrid, or holds one beside other parts, which would be lost.
    """
    if not is_hybrid(model):
        raise CheckpointError(
            f"this {type(model).__name__} is not a hybrid: nothing in it is converted. Save it with its own library, "
            "or convert it first."
        )
    name, hybrid = next(((name, part) for name, part in model.named_modules() if RECORD in part.__dict__), ("", None))
    if hybrid is None:
        raise CheckpointError(
            f"this {type(model).__name__} holds converted attention but not the record that latte_convert.convert and "
            "load leave on a hybrid: save the model that they returned, or a copy of it."
        )
    if hybrid is not model and len(hybrid.state_dict()) != len(model.state_dict()):
        raise CheckpointError(
            f"this {type(model).__name__} holds a hybrid, {type(hybrid).__name__} at '{name}', and tensors of its own, "
            f"which an artifact has no place for: save model.{name} and the rest apart."
        )
    return hybrid, hybrid.__dict__[RECORD]
