"""From what the stages of a conversion found to its report."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from latte_convert.attention import AttentionSite
from latte_convert.calibration.fitted import Fitted
from latte_convert.data.feed import anchor
from latte_convert.data.samples import fingerprint
from latte_convert.environment import library_versions, peak_memory_bytes, tool_version
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.agreement import Agreement
from latte_convert.measuring.fidelity import Fidelity
from latte_convert.measuring.map_result import AttentionMap
from latte_convert.measuring.stripes import Stripes, correlation
from latte_convert.measuring.times import AttentionTime
from latte_convert.report.schema import (
    AgreementReport,
    AttentionTimeReport,
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
from latte_convert.selection.budget import Point
from latte_convert.selection.choice import RUINOUS, Choice
from latte_convert.selection.points import kernels_of
from latte_convert.selection.policy import count
from latte_convert.task import Task
from latte_convert.wording import some


@dataclass(frozen=True)
class Findings:
    """What the stages of a conversion found.

    Attributes:
        fitted: The kernels of each site.
        choice: What becomes of each site.
        attention: How much of a pass is attention.
        fidelity: Agreement on held-out samples; None where nothing was converted to be measured.
        maps: Attention maps of a few converted sites.
        stripes: Stripes of the exact attention, by site, where they were asked for.
        seconds: Wall time of each stage.
    """

    fitted: Fitted
    choice: Choice
    attention: AttentionTime
    fidelity: Fidelity | None = None
    maps: tuple[AttentionMap, ...] = ()
    stripes: Mapping[str, Stripes] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def build_report(task: Task, found: Findings) -> Report:
    """Put together what a conversion has measured."""
    choice = found.choice
    converted = [site.name for site in choice.plan.converted]
    return Report(
        tool_version=tool_version(),
        library_versions=library_versions(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        source=_source(task),
        recipe=task.recipe.resolved().model_dump(mode="json"),
        calibration=_calibration(task),
        sites=[_site(found, site, site.name in converted) for site in found.fitted.sites],
        converted=converted,
        merges=dict(choice.plan.merges),
        attention=AttentionTimeReport(
            tokens=found.attention.tokens,
            original_ms=found.attention.original_ms,
            without_ms=found.attention.without_ms,
            said=str(found.attention),
        ),
        fidelity=_fidelity(found.fidelity, len(task.holdout)) if found.fidelity else None,
        cost=_cost(task, found, found.fidelity) if found.fidelity else None,
        frontier=[_frontier_point(task, found, point) for point in choice.frontier] or None,
        maps=list(found.maps) or None,
        stripes=_stripes(found) if found.stripes else None,
        warnings=list(_warnings(task, found)),
    )


def _warnings(task: Task, found: Findings) -> Iterator[str]:
    """What a reader should know before trusting the figures; what matters most comes first."""
    if found.fidelity is not None and found.fidelity.speedup <= 1:
        yield not_faster(found.fidelity)
    if task.unexpected_keys and task.source is not None:
        yield (
            f"{len(task.unexpected_keys)} tensors of the checkpoint have no place in {task.source.model_class} "
            f"({some(task.unexpected_keys)}); they are kept in the artifact."
        )
    yield from task.notes
    yield from _lost_grids(found.fitted.sites)
    broken = [name for name, score in found.choice.scores.items() if score.value == float("inf")]
    if broken:
        yield f"{len(broken)} sites are not finite when linear and were not chosen: {some(broken)}."
    ruinous = {
        site.name: score.value
        for site in found.choice.plan.converted
        if task.recipe.scorer != "paper" and (score := found.choice.scores.get(site.name)) and score.value > RUINOUS
    }
    for name, value in ruinous.items():
        yield (
            f"{name} alone changes the final output by {100 * value:.0f}% of its variance: keep it exact with "
            f"--exclude {name}, unless an evaluation shows that your task bears it."
        )
    asked, converted = count(found.fitted.sites, task.recipe), len(found.choice.plan.converted)
    if asked is not None and converted < asked:
        yield (
            f"{asked} sites were asked for, {converted} are converted: at the others every kernel is softmax itself at "
            "the length of these samples, is not finite, or ruins the model."
        )
    if found.choice.plan.empty:
        yield (
            "nothing was converted: exact attention is all that the recipe's budget asks for or allows. Set ratio or "
            "k, or a lower max_flops or min_fidelity."
        )
    if found.fidelity is not None:
        yield from _no_saving(task, found, found.fidelity)


def _lost_grids(sites: Sequence[AttentionSite]) -> Iterator[str]:
    """A warning where the tokens of a vision tower are an image, and where each lies is not known."""
    lost = [s.name for s in sites if s.eligible and s.tower == "vision" and s.layout and s.layout.grid is None]
    if lost:
        yield (
            f"the grid of {len(lost)} sites of the vision tower is not known ({some(lost)}): their tokens are taken "
            "for a sequence, and near_far's windows are pieces of it, not of the image."
        )


def not_faster(fidelity: Fidelity) -> str:
    """That a hybrid is not faster than its original, and the most that any attention kernel could gain."""
    longest = max((shape.keys for shape in fidelity.shapes.values()), default=0)
    limit = ""
    if fidelity.ceiling > 1:  # below, the clock saw something else than attention
        limit = (
            f" Attention takes {1 - 1 / fidelity.ceiling:.0%} of the original's time, so no attention kernel can be "
            f"more than {fidelity.ceiling:.2f} times as fast."
        )
    return (
        f"the hybrid is not faster at this length ({longest} tokens): {fidelity.hybrid_ms:.3g} ms a sample, the "
        f"original {fidelity.original_ms:.3g} ms.{limit} Use longer inputs, or keep the original."
    )


def _no_saving(task: Task, found: Findings, fidelity: Fidelity) -> Iterator[str]:
    """A warning where held-out samples are so short that the fidelity of converted sites comes cheap."""
    kernels = found.choice.kernels
    shapes = {name: fidelity.left.get(name, shape) for name, shape in fidelity.shapes.items() if name in kernels}
    idle = [
        name
        for name, shape in shapes.items()
        if shape.keys < task.recipe.min_tokens or kernels[name].flops(shape) >= softmax_flops(shape)
    ]
    if idle:
        longest = max(shapes[name].keys for name in idle)
        yield (
            f"{len(idle)} of {len(shapes)} converted sites need no fewer FLOPs than softmax at the length of these "
            f"samples ({longest} keys at most): {some(idle)}. Their fidelity says nothing of longer inputs: calibrate "
            "on samples as long as those you deploy on."
        )


def _finite(value: float | None) -> float | None:
    """A number that JSON can hold, or None."""
    return value if value is not None and math.isfinite(value) else None


def _source(task: Task) -> SourceReport:
    source = task.source
    return SourceReport(
        id=source.id if source else "in memory",
        revision=source.revision if source else None,
        library=task.host.adapter.name,
        model_class=type(task.host.model).__name__,
        sha256=task.weights_sha256,
    )


def _calibration(task: Task) -> CalibrationReport:
    samples = task.samples
    return CalibrationReport(
        source=", ".join(s.source for s in samples) or "ready batches",
        modality=", ".join(s.modality for s in samples) or "tensors",
        requested=sum(s.requested for s in samples) or len(task.fitting) + len(task.holdout),
        used=len(task.fitting),
        held_out=len(task.holdout),
        truncated=len(set().union(*(processor.truncated for processor in task.processors))),
        skipped=[{"id": skip.id, "reason": skip.reason} for s in samples for skip in s.skipped],
        fingerprint=fingerprint(samples),
        processors=[processor.description() for processor in task.processors],
    )


def _site(found: Findings, site: AttentionSite, converted: bool) -> SiteReport:
    score, fit = found.choice.scores.get(site.name), found.choice.fits.get(site.name)
    heldout = found.fidelity.sites.get(site.name) if found.fidelity else None
    return SiteReport(
        name=site.name,
        tower=site.tower,
        kind=site.kind,
        causal=site.causal,
        heads=site.heads,
        head_dim=site.head_dim,
        value_dim=site.value_dim,
        layout=str(site.layout) if site.layout else None,
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
        parameters={name: values.tolist() for name, values in kernel.scalars().items()},
        legend=kernel.legend,
        calibration_error=_finite(error),
        heldout_cosine=_finite(heldout.cosine) if heldout else None,
    )


def _agreement(agreement: Agreement) -> AgreementReport:
    return AgreementReport(
        cosine=agreement.cosine,
        relative_error=_finite(agreement.relative_error),
        top1=agreement.top1 if agreement.kind == "logits" else None,
        agreed=agreement.agreed,
        divergence=_finite(agreement.divergence / max(agreement.tokens, 1)) if agreement.kind == "logits" else None,
        distance=_finite(agreement.distance / max(agreement.weight, 1e-12)) if agreement.kind == "boxes" else None,
        likeness=_finite(agreement.likeness),
        interval=agreement.interval,
    )


def _fidelity(fidelity: Fidelity, samples: int) -> FidelityReport:
    return FidelityReport(
        samples=samples,
        primary=fidelity.primary,
        outputs={name: _agreement(value) for name, value in fidelity.outputs.items()},
        blocks={name: _agreement(value) for name, value in fidelity.blocks.items()},
    )


def _frontier_point(task: Task, found: Findings, point: Point) -> FrontierPoint:
    kernels = kernels_of(found.fitted, point).values()
    return FrontierPoint(
        converted=len(point.kernels),
        kernels=dict(Counter(map(task.label, kernels))),
        flops_share=point.flops,
        predicted_error=_finite(point.error),
        cosine=_finite(point.cosine),
        chosen=point is found.choice.chosen,
        tokens_left=min(point.merges.values(), default=1.0),
    )


def _stripes(found: Findings) -> StripesReport:
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
        for name, each in found.stripes.items()
    }
    scores = {name: score.value for name, score in found.choice.scores.items()}
    return StripesReport(sites=sites, correlation=correlation(found.stripes, scores))


def _cost(task: Task, found: Findings, fidelity: Fidelity) -> CostReport:
    kernels = found.choice.kernels
    sums = {"true": [0.0, 0.0], "paper": [0.0, 0.0]}
    for site in found.fitted.sites:
        if site.name not in fidelity.shapes:
            continue
        shape = fidelity.shapes[site.name]
        exact = ExactKernel(site.heads, site.head_dim)
        left = fidelity.left.get(site.name, shape)
        used = kernels.get(site.name, exact) if left.keys >= task.recipe.min_tokens else exact
        for column, (kernel, seen) in enumerate(((exact, shape), (used, left))):
            sums["true"][column] += kernel.flops(seen)
            sums["paper"][column] += kernel.paper_flops(seen)
    model = task.host.model
    added = sum(parameter.numel() for kernel in kernels.values() for parameter in kernel.parameters())
    ours = {id(parameter) for kernel in kernels.values() for parameter in kernel.parameters()}
    return CostReport(
        parameters=sum(p.numel() for p in model.parameters() if id(p) not in ours),
        parameters_added=added,
        tokens={name: float(shape.keys) for name, shape in fidelity.shapes.items()},
        flops=FlopsReport(original=sums["true"][0], hybrid=sums["true"][1]),
        flops_paper=FlopsReport(original=sums["paper"][0], hybrid=sums["paper"][1]),
        forward_ms={
            "original": fidelity.original_ms,
            "hybrid": fidelity.hybrid_ms,
            "without_attention": fidelity.free_ms,
        },
        seconds=dict(found.seconds),
        peak_memory_bytes=peak_memory_bytes(),
        device=str(anchor(model).device),
        threads=torch.get_num_threads(),
    )
