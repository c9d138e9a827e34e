"""From a finished job to its report."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from latte_convert.attention import AttentionSite
from latte_convert.calibration.candidates import label
from latte_convert.environment import library_versions, peak_memory_bytes, tool_version
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.agreement import Agreement
from latte_convert.measuring.flops import attention_flops
from latte_convert.measuring.stripes import correlation
from latte_convert.report.schema import (
    AgreementReport,
    CalibrationReport,
    CostReport,
    FidelityReport,
    FitReport,
    FlopsReport,
    FrontierPoint,
    HeadStripes,
    Report,
    ScoreReport,
    SiteReport,
    SourceReport,
    StripesReport,
)
from latte_convert.wording import some

if TYPE_CHECKING:
    from latte_convert.data.samples import SampleSet
    from latte_convert.measuring.fidelity import Fidelity
    from latte_convert.opening import Job
    from latte_convert.selection.budget import Point


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
        frontier=[_frontier_point(job, point, chosen) for point, chosen in job.frontier] or None,
        maps=job.maps or None,
        stripes=_stripes(job) if job.stripes else None,
        warnings=[*job.warnings, *_no_saving(job)],
    )


def _no_saving(job: Job) -> list[str]:
    """A warning where held-out samples are so short that the fidelity of converted sites comes cheap."""
    if job.plan is None or job.fidelity is None:
        return []
    kernels = job.kernels(job.plan.converted)
    shapes = {name: shape for name, shape in job.fidelity.shapes.items() if name in kernels}
    idle = [
        name
        for name, shape in shapes.items()
        if shape.keys < job.recipe.min_tokens or kernels[name].flops(shape) >= softmax_flops(shape)
    ]
    if not idle:
        return []
    longest = max(shapes[name].keys for name in idle)
    return [
        f"{len(idle)} of {len(shapes)} converted sites need no fewer FLOPs than softmax at the length of these samples "
        f"({longest} keys at most): {some(idle)}. Their fidelity says nothing "
        "of longer inputs: calibrate on samples as long as those you deploy on."
    ]


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


def _fit(kernel: Kernel, error: float | None, heldout: Agreement | None) -> FitReport:
    return FitReport(
        kernel=kernel.name,
        options=kernel.options,
        parameters={name: values.tolist() for name, values in kernel.summary().items()},
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


def _frontier_point(job: Job, point: Point, chosen: bool) -> FrontierPoint:
    kernels = [job.fitted[site][index].kernel for site, index in point.kernels.items()]
    return FrontierPoint(
        converted=len(point.kernels),
        kernels=dict(Counter(label(kernel, job.candidates) for kernel in kernels if kernel is not None)),
        flops_share=point.flops,
        predicted_error=_finite(point.error),
        cosine=_finite(point.cosine),
        chosen=chosen,
    )


def _stripes(job: Job) -> StripesReport:
    sites = {
        name: [
            HeadStripes(
                column_strength=head.column_strength,
                row_strength=head.row_strength,
                keys=[token.index for token in head.keys],
                queries=[token.index for token in head.queries],
            )
            for head in each.heads
        ]
        for name, each in job.stripes.items()
    }
    scores = {name: score.value for name, score in job.scores.items()}
    return StripesReport(sites=sites, correlation=correlation(job.stripes, scores))


def _cost(job: Job, fidelity: Fidelity, converted: set[str]) -> CostReport:
    sums = {"true": [0.0, 0.0], "paper": [0.0, 0.0]}
    for site in job.sites:
        if site.name not in fidelity.shapes:
            continue
        shape = fidelity.shapes[site.name]
        exact = ExactKernel(site.heads, site.head_dim)
        kernel = job.fits[site.name].kernel if site.name in converted else None
        linear = kernel is not None and shape.keys >= job.recipe.min_tokens
        for column, used in enumerate((exact, kernel if linear and kernel else exact)):
            flops = attention_flops(used, shape)
            sums["true"][column] += flops.true
            sums["paper"][column] += flops.paper
    added = sum(p.numel() for k in job.kernels(job.plan.converted if job.plan else ()).values() for p in k.parameters())
    ours = {id(p) for k in job.kernels(job.eligible).values() for p in k.parameters()}
    return CostReport(
        parameters=sum(p.numel() for p in job.model.parameters() if id(p) not in ours),
        parameters_added=added,
        tokens={name: float(shape.keys) for name, shape in fidelity.shapes.items()},
        flops=FlopsReport(original=sums["true"][0], hybrid=sums["true"][1]),
        flops_paper=FlopsReport(original=sums["paper"][0], hybrid=sums["paper"][1]),
        forward_ms={"original": fidelity.original_ms, "hybrid": fidelity.hybrid_ms},
        seconds=job.seconds,
        peak_memory_bytes=peak_memory_bytes(),
        device=str(next(job.model.parameters()).device),
        threads=torch.get_num_threads(),
    )
