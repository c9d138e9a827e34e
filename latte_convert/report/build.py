"""From a finished job to its report."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from latte_convert.adapters import AttentionSite
from latte_convert.bench.flops import attention_flops
from latte_convert.evaluation.compare import Agreement
from latte_convert.kernels.latte import LatteKernel
from latte_convert.report.schema import (
    AgreementReport,
    CalibrationReport,
    CostReport,
    FidelityReport,
    FitReport,
    FlopsReport,
    Report,
    ScoreReport,
    SiteReport,
    SourceReport,
)
from latte_convert.runtime.device import library_versions, peak_memory_bytes, tool_version

if TYPE_CHECKING:
    from latte_convert.calibration.data import SampleSet
    from latte_convert.evaluation.fidelity import Fidelity
    from latte_convert.job import Job


def build_report(job: Job) -> Report:
    """Put together what a job has measured."""
    converted = [site.name for site in job.plan.converted] if job.plan else []
    return Report(
        tool_version=tool_version(),
        library_versions=library_versions(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        source=_source(job),
        recipe=job.recipe.model_dump(mode="json"),
        calibration=_calibration(job),
        sites=[_site(job, site, site.name in converted) for site in job.sites],
        converted=converted,
        fidelity=_fidelity(job.fidelity, len(job.holdout)) if job.fidelity else None,
        cost=_cost(job, job.fidelity, set(converted)) if job.fidelity else None,
        warnings=list(job.warnings),
    )


def _finite(value: float | None) -> float | None:
    """A number that JSON can hold, or None."""
    return value if value is not None and math.isfinite(value) else None


def _source(job: Job) -> SourceReport:
    from latte_convert.artifact.files import sha256_file

    cls = type(job.model)
    source = job.source
    return SourceReport(
        id=source.id if source else "in memory",
        revision=source.revision if source else None,
        library=job.adapter.name,
        model_class=cls.__name__,
        sha256={path.name: sha256_file(path) for path in source.weights} if source else {},
    )


def _calibration(job: Job) -> CalibrationReport:
    samples = job.samples
    return CalibrationReport(
        source=", ".join(s.source for s in samples) or "ready batches",
        modality=", ".join(s.modality for s in samples) or "tensors",
        requested=sum(s.requested for s in samples) or len(job.fitting) + len(job.holdout),
        used=len(job.fitting),
        held_out=len(job.holdout),
        truncated=len(set().union(*(processor.truncated for processor in job.processors))),
        skipped=[{"id": skip.id, "reason": skip.reason} for s in samples for skip in s.skipped],
        fingerprint=_fingerprint(samples),
    )


def _fingerprint(samples: Sequence[SampleSet]) -> str:
    """That of the one sample set, or the hash of several."""
    prints = [s.fingerprint() for s in samples]
    return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest() if prints else ""


def _site(job: Job, site: AttentionSite, converted: bool) -> SiteReport:
    score, fit = job.scores.get(site.name), job.fits.get(site.name)
    heldout = job.fidelity.sites.get(site.name) if job.fidelity else None
    return SiteReport(
        name=site.name,
        tower=site.tower,
        kind=site.kind,
        causal=site.causal,
        heads=site.heads,
        head_dim=site.head_dim,
        eligible=site.eligible,
        reason=site.reason,
        converted=converted,
        score=ScoreReport(value=_finite(score.value), cosine=_finite(score.cosine), mse=_finite(score.mse))
        if score
        else None,
        fit=_fit(fit.kernel, fit.error, heldout) if fit and fit.kernel is not None else None,
    )


def _fit(kernel: LatteKernel, error: float | None, heldout: Agreement | None) -> FitReport:
    with torch.no_grad():
        ratio = kernel.delta_q * kernel.delta_k / (kernel.beta_q * kernel.beta_k)
    return FitReport(
        alpha=kernel.alpha.tolist(),
        ratio=ratio.tolist(),
        calibration_error=_finite(error),
        heldout_cosine=_finite(heldout.cosine) if heldout else None,
    )


def _agreement(agreement: Agreement, name: str = "") -> AgreementReport:
    return AgreementReport(
        cosine=agreement.cosine,
        relative_error=_finite(agreement.relative_error),
        top1=agreement.top1 if name.endswith("logits") else None,
    )


def _fidelity(fidelity: Fidelity, samples: int) -> FidelityReport:
    return FidelityReport(
        samples=samples,
        primary=fidelity.primary,
        outputs={name: _agreement(value, name) for name, value in fidelity.outputs.items()},
        blocks={name: _agreement(value) for name, value in fidelity.blocks.items()},
    )


def _cost(job: Job, fidelity: Fidelity, converted: set[str]) -> CostReport:
    sums = {"true": [0.0, 0.0], "paper": [0.0, 0.0]}
    for site in job.sites:
        if site.name not in fidelity.shapes:
            continue
        queries, keys, head_dim = (round(n) for n in fidelity.shapes[site.name])
        linear = site.name in converted and keys >= job.recipe.min_tokens
        for column, kernel in enumerate(("exact", job.recipe.kernel if linear else "exact")):
            flops = attention_flops(
                kernel,
                queries=queries,
                keys=keys,
                heads=site.heads,
                head_dim=head_dim,
                value_dim=site.head_dim,
                causal=site.causal,
            )
            sums["true"][column] += flops.true
            sums["paper"][column] += flops.paper
    added = sum(p.numel() for k in job.kernels(job.plan.converted if job.plan else ()).values() for p in k.parameters())
    ours = {id(p) for k in job.kernels(job.eligible).values() for p in k.parameters()}
    return CostReport(
        parameters=sum(p.numel() for p in job.model.parameters() if id(p) not in ours),
        parameters_added=added,
        tokens={name: keys for name, (_, keys, _) in fidelity.shapes.items()},
        flops=FlopsReport(original=sums["true"][0], hybrid=sums["true"][1]),
        flops_paper=FlopsReport(original=sums["paper"][0], hybrid=sums["paper"][1]),
        forward_ms={"original": fidelity.original_ms, "hybrid": fidelity.hybrid_ms},
        seconds=job.seconds,
        peak_memory_bytes=peak_memory_bytes(),
        device=str(next(job.model.parameters()).device),
        threads=torch.get_num_threads(),
    )
