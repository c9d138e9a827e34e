"""Reports as conversions make them, without a conversion."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from latte_convert.artifact.manifest import CalibrationRecord, Manifest, SourceRecord
from latte_convert.bench.result import BenchReport, Crossover, LengthResult, Timing, VariantResult
from latte_convert.evaluation.result import EvalReport, MetricReport
from latte_convert.measuring.map_result import AttentionMap, HeadShares, Heatmap
from latte_convert.recipe import Recipe
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
from latte_convert.report.write import write_report

LONG = "model.vision_tower.backbone.stages.encoder.layers.{}.self_attn"
HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def site(name: str, score: float | None, *, converted: bool, reason: str | None = None) -> SiteReport:
    eligible = reason is None
    return SiteReport(
        name=name,
        tower="vision",
        kind="self",
        causal=False,
        heads=6,
        head_dim=64,
        layout="37 x 37 + 1 prefix",
        eligible=eligible,
        reason=reason,
        converted=converted,
        score=ScoreReport(value=score, cosine=None, mse=0.001) if eligible else None,
        fit=fit(heldout_cosine=0.971 if converted else None) if eligible else None,
    )


def fit(**changes: object) -> FitReport:
    start = FitReport(
        kernel="latte",
        options={"sigma": True, "granularity": "layer", "tte": True, "jpn": False},
        parameters={"alpha": [0.41], "ratio": [18.7]},
        calibration_error=0.0312,
    )
    return start.model_copy(update=changes)


def scores(count: int) -> list[float]:
    """From 0.0021 up to 2.3, with the bumps that real models have: more than two decades."""
    return [0.0021 * 1100 ** (((i * 7) % count) / max(count - 1, 1)) for i in range(count)]


def make_report(
    *,
    sites: int = 12,
    convert: int = 8,
    pattern: str = "encoder.layer.{}.attention.attention",
    cosine: float = 0.9341,
    fidelity: bool = True,
    forward_ms: tuple[float, float] = (41.2, 36.9),
    **changes: object,
) -> Report:
    values = scores(sites)
    robust = set(sorted(range(sites), key=values.__getitem__)[:convert])
    rows = [site(pattern.format(i), values[i], converted=i in robust) for i in range(sites)]
    blocks = {
        pattern.format(i).rsplit(".attention.attention", 1)[0].removesuffix(".self_attn"): AgreementReport(
            cosine=1 - (1 - cosine) * (i + 1) / sites, relative_error=0.04 + 0.3 * i / sites
        )
        for i in range(sites)
    }
    measured = FidelityReport(
        samples=8,
        primary="last_hidden_state",
        outputs={
            "last_hidden_state": AgreementReport(cosine=cosine, relative_error=0.3521),
            "last_hidden_state.prefix": AgreementReport(cosine=cosine - 0.02, relative_error=0.4127),
            "pooler_output": AgreementReport(cosine=cosine - 0.02, relative_error=None),
        },
        blocks=blocks,
    )
    cost = CostReport(
        parameters=22_056_576,
        parameters_added=3112,
        tokens={row.name: 785.0 for row in rows},
        flops=FlopsReport(original=11.358e9, hybrid=5.107e9),
        flops_paper=FlopsReport(original=2.8394e9, hybrid=1.1063e9),
        forward_ms=dict(zip(("original", "hybrid"), forward_ms, strict=True)),
        seconds={"load": 0.61, "calibrate": 14.2, "score": 9.83, "measure": 5.02},
        peak_memory_bytes=1_417_339_904,
        device="cpu",
        threads=2,
    )
    report = Report(
        tool_version="0.1.0",
        library_versions={"torch": "2.14.1", "transformers": "5.24.0", "datasets": "5.2.0"},
        created="2026-01-15T09:30:00+00:00",
        source=SourceReport(
            id="facebook/dinov2-small",
            revision="ed25f3a31f01632728cabb09d1542f84ab7b0056",
            library="transformers",
            model_class="Dinov2Model",
            sha256={"model.safetensors": HEX},
        ),
        recipe=Recipe(ratio=0.67).model_dump(mode="json"),
        calibration=CalibrationReport(
            source="photos/",
            modality="images",
            requested=32,
            used=23,
            held_out=8,
            truncated=0,
            skipped=[{"id": "IMG_0042.jpg", "reason": "truncated file: 12 of 48 kB"}],
            fingerprint=HEX,
        ),
        sites=rows,
        converted=[row.name for row in rows if row.converted],
        fidelity=measured if fidelity else None,
        cost=cost if fidelity else None,
        warnings=[],
    )
    return report.model_copy(update=changes)


def make_manifest(**changes: Any) -> Manifest:
    """The manifest of the artifact that ``make_bench`` and ``make_evaluation`` are of."""
    start = Manifest(
        tool_version="0.1.0",
        library_versions={"torch": "2.14.1"},
        source=SourceRecord(
            id="facebook/dinov2-small",
            revision=None,
            library="transformers",
            model_class="Dinov2Model",
            sha256={"model.safetensors": HEX},
            tensors_sha256=HEX,
            unexpected_keys=[],
        ),
        recipe=Recipe(ratio=0.67).model_dump(mode="json"),
        calibration=CalibrationRecord(fingerprint=HEX, requested=32, used=23, held_out=8, skipped=[]),
        sites=[],
        min_tokens=0,
        probe=None,
        files={"model.safetensors": HEX},
    )
    return start.model_copy(update=changes)


def write_artifact(path: Path, report: Report, **changes: Any) -> Path:
    """What ``latte report`` reads of an artifact: its manifest and its report, in a new directory."""
    path.mkdir()
    (path / "latte.json").write_text(make_manifest(**changes).model_dump_json())
    write_report(report, path / "report.json")
    return path


def timing(median: float) -> Timing:
    return Timing(median_ms=median, lower_ms=0.97 * median, upper_ms=1.04 * median, rounds=7)


def make_bench(*, crossover: int | None = 1370) -> BenchReport:
    """Exact attention grows with the square of the length, the hybrid linearly; the longest exact run did not fit."""
    lengths = []
    for pixels, tokens in ((224, 257), (392, 785), (518, 1370), (896, 4097), (1274, 8282)):
        exact, linear = tokens**2 / 50_000, tokens / 45
        variants = [
            VariantResult(
                name="original",
                detail="sdpa: math",
                forward=timing(40 + exact),
                attention=timing(exact),
                forward_memory_bytes=40 * 2**20 + tokens**2 * 24,
                attention_memory_bytes=tokens**2 * 24,
            ),
            VariantResult(
                name="hybrid",
                forward=timing(40 + linear),
                attention=timing(linear),
                forward_ratio=(40 + linear) / (40 + exact),
                attention_ratio=linear / exact,
                forward_memory_bytes=40 * 2**20 + tokens * 3000,
                attention_memory_bytes=tokens * 3000,
                cosine=0.984,
            ),
            VariantResult(
                name="hybrid_compiled",
                forward=timing(38 + linear / 2),
                forward_ratio=(38 + linear / 2) / (40 + exact),
                reason="attention alone is not compiled",
            ),
        ]
        if tokens == 8282:
            variants[0] = VariantResult(name="original", reason="out of memory")
        lengths.append(LengthResult(label=f"{pixels} px", resolution=pixels, tokens=tokens, sites=8, variants=variants))
    return BenchReport(
        tool_version="0.1.0",
        library_versions={"torch": "2.14.1"},
        created="2026-01-16T09:30:00+00:00",
        artifact="dinov2-hybrid",
        artifact_fingerprint=make_manifest().fingerprint,
        source="facebook/dinov2-small",
        modality="image",
        data=None,
        device="cpu",
        threads=2,
        dtype="float32",
        lengths=lengths,
        crossover=Crossover(tokens=crossover, bracketed=True),
        crossover_compiled=Crossover(tokens=785, bracketed=True),
        crossover_attention=Crossover(tokens=1370, bracketed=True),
        guard=[],
        statements=["The hybrid is faster than the original from 1,370 tokens (518 px) on."],
        min_tokens_written=None,
        seconds=61.0,
    )


def make_evaluation(
    *, retention: float = 0.986, task: str = "knn", data: tuple[str, ...] = ("clothing/",)
) -> EvalReport:
    top1 = MetricReport(
        original=0.871,
        hybrid=0.871 * retention,
        lower_is_better=False,
        retention=retention,
        interval=(retention - 0.03, retention + 0.02),
    )
    return EvalReport(
        tool_version="0.1.0",
        library_versions={"torch": "2.14.1"},
        artifact="dinov2-hybrid",
        artifact_fingerprint=make_manifest().fingerprint,
        source="facebook/dinov2-small",
        model_class="Dinov2Model",
        task=task,
        data=list(data),
        samples=179,
        skipped=[],
        truncated=0,
        primary="top1",
        metrics={
            "top1": top1,
            "error": MetricReport(
                original=0.129, hybrid=0.14, lower_is_better=True, retention=None, interval=None, reason="not defined"
            ),
        },
        note="20 nearest neighbours, cosine.",
        unused_sites=[],
        exact_sites=[],
        resamples=1000,
        seed=0,
        batch_size=16,
        device="cpu",
        seconds={"run": 3.0},
        gate=None,
    )


def heatmap(rows: int, columns: int, stripe: int) -> Heatmap:
    """A diagonal and one column stripe."""
    cells = [200 if j == stripe else 120 if i == j else 30 for i in range(rows) for j in range(columns)]
    return Heatmap(
        levels=base64.b64encode(bytes(cells)).decode("ascii"), peak=0.31, columns=[stripe], rows=[3] if rows > 3 else []
    )


def make_map(name: str, *, rows: int = 64, columns: int = 64) -> AttentionMap:
    shares = [
        HeadShares(
            exact_columns=0.1 * head, exact_rows=0.02, converted_columns=0.09 * head, converted_rows=0.0002, moved=0.3
        )
        for head in range(6)
    ]
    return AttentionMap(
        site=name,
        kernel="near_far",
        queries=1370,
        keys=1370,
        prefix=1,
        shape=(rows, columns),
        heads=shares,
        head=5,
        exact=heatmap(rows, columns, 0),
        converted=heatmap(rows, columns, 2),
    )


def make_full(**changes: Any) -> Report:
    """A report with every section."""
    report = make_report(**changes)
    plans = [(0, 1.0, 1.0), (4, 0.78, 0.999), (8, 0.55, 0.991), (12, 0.33, 0.962)]
    frontier = [
        FrontierPoint(
            converted=sites,
            kernels={kernel: sites} if sites else {},
            flops_share=share * factor,
            predicted_error=round(1.1 * (1 - cosine) * penalty, 6),
            cosine=None if sites == 4 else round(1 - (1 - cosine) * penalty, 6),
            chosen=kernel == "near_far" and sites == 8,
        )
        for kernel, factor, penalty in (("near_far", 1.0, 1.0), ("monarch", 0.9, 2.5), ("latte", 0.8, 9.0))
        for sites, share, cosine in plans[0 if kernel == "near_far" else 1 :]
    ]
    heads = [
        HeadStripes(column_strength=0.12 * head, row_strength=0.01 * head, keys=[0, 411, 37][:head], queries=[5])
        for head in range(6)
    ]
    return report.model_copy(
        update={
            "frontier": frontier,
            "maps": [make_map(report.sites[i].name) for i in (0, 1, 2)],
            "stripes": StripesReport(sites={site.name: heads for site in report.sites}, correlation=0.58),
            "bench": make_bench(),
            "evaluations": [make_evaluation()],
        }
    )
