"""What changed from one report to another, for a CI job: ``latte report --compare OLD NEW``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from latte_convert.evaluation.result import EvalReport
from latte_convert.report.schema import Report

TOLERANCE = 0.005
"""How far a share or a cosine may get worse before it counts as a regression."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ReportId(_Model):
    """One of the two reports."""

    path: str
    created: str
    tool_version: str
    source: str = Field(description="Id of the original.")
    calibration: str = Field(description="Fingerprint of the samples.")


class Change(_Model):
    """One number in both reports."""

    name: str = Field(
        description="Such as fidelity.last_hidden_state.cosine or evaluation.knn[photos/].top1.retention."
    )
    better: Literal["higher", "lower"]
    old: float | None = Field(description="Null where the old report does not have it.")
    new: float | None = Field(description="Null where the new report does not have it: that is a regression.")
    change: float | None = Field(description="new - old.")
    regression: bool = Field(description="Whether it got worse by more than the tolerance, or is gone.")


class KernelChange(_Model):
    """A site that is converted in both reports, by different kernels."""

    site: str
    old: str | None
    new: str | None


class SiteChanges(_Model):
    """How the sets of converted sites differ."""

    added: list[str] = Field(description="Converted in the new report only.")
    removed: list[str] = Field(description="Converted in the old report only.")
    kernels: list[KernelChange]


class Comparison(_Model):
    """The document that ``latte report --compare`` prints."""

    schema_version: Literal[1] = 1
    old: ReportId
    new: ReportId
    tolerance: float
    ok: bool = Field(description="Whether nothing regressed.")
    regressions: list[str] = Field(description="Names of the changes that are regressions.")
    changes: list[Change]
    sites: SiteChanges


def flops_share(report: Report) -> float | None:
    """Attention FLOPs of the hybrid over those of the original; None where they were not counted."""
    flops = report.cost.flops if report.cost else None
    return flops.hybrid / flops.original if flops and flops.original else None


def compare(
    old: Report, new: Report, *, tolerance: float = TOLERANCE, old_path: str = "old", new_path: str = "new"
) -> Comparison:
    """Compare two reports, number by number.

    Compares the cosine of every output, the share of the attention FLOPs, and the retention of every task metric.
    Evaluations are matched by task and data, as the user wrote them. A number that only the new report has is listed
    and cannot regress. Wall times are left out: they depend on the machine.

    Args:
        old: The report to hold on to.
        new: The report to judge.
        tolerance: How far a number may get worse; all are shares or cosines.
        old_path: Where ``old`` was read from, for the document.
        new_path: Where ``new`` was read from.
    """
    before, after = _numbers(old), _numbers(new)
    changes = [_change(name, before.get(name), after.get(name), tolerance) for name in dict.fromkeys([*before, *after])]
    regressions = [change.name for change in changes if change.regression]
    return Comparison(
        old=_id(old, old_path),
        new=_id(new, new_path),
        tolerance=tolerance,
        ok=not regressions,
        regressions=regressions,
        changes=changes,
        sites=_sites(old, new),
    )


def _id(report: Report, path: str) -> ReportId:
    return ReportId(
        path=path,
        created=report.created,
        tool_version=report.tool_version,
        source=report.source.id,
        calibration=report.calibration.fingerprint,
    )


_FLOPS = "cost.flops_share"


def _numbers(report: Report) -> dict[str, float]:
    """Every number that is compared, by name."""
    return dict(_read(report))


def _read(report: Report) -> Iterator[tuple[str, float]]:
    if report.fidelity:
        for name, output in report.fidelity.outputs.items():
            yield f"fidelity.{name}.cosine", output.cosine
            if output.agreed is not None:
                yield f"fidelity.{name}.likeness", output.alike
    share = flops_share(report)
    if share is not None:
        yield _FLOPS, share
    for name, evaluation in _evaluations(report):
        for metric, row in evaluation.metrics.items():
            if row.retention is not None:
                yield f"{name}.{metric}.retention", row.retention


def _evaluations(report: Report) -> Iterator[tuple[str, EvalReport]]:
    """The evaluations, named by task and data; of several on the same data, the later ones are numbered."""
    seen: Counter[str] = Counter()
    for evaluation in report.evaluations or ():
        name = f"evaluation.{evaluation.task}[{', '.join(evaluation.data)}]"
        seen[name] += 1
        yield f"{name}#{seen[name]}" if seen[name] > 1 else name, evaluation


def _change(name: str, old: float | None, new: float | None, tolerance: float) -> Change:
    sign = -1 if name == _FLOPS else 1
    difference = None if old is None or new is None else new - old
    return Change(
        name=name,
        better="lower" if name == _FLOPS else "higher",
        old=old,
        new=new,
        change=difference,
        regression=new is None if difference is None else sign * difference < -tolerance,
    )


def _sites(old: Report, new: Report) -> SiteChanges:
    kernels = [{site.name: site.fit.kernel if site.fit else None for site in r.sites} for r in (old, new)]
    return SiteChanges(
        added=[name for name in new.converted if name not in old.converted],
        removed=[name for name in old.converted if name not in new.converted],
        kernels=[
            KernelChange(site=name, old=kernels[0].get(name), new=kernels[1].get(name))
            for name in new.converted
            if name in old.converted and kernels[0].get(name) != kernels[1].get(name)
        ],
    )
