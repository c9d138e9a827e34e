"""What ``report.json`` holds. Published as JSON Schema by ``latte schema``.

Strict JSON throughout: a number that could not be measured is null, and a ``reason`` beside it says why.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AgreementReport(_Model):
    """Agreement of the hybrid with the original on the same inputs."""

    cosine: float = Field(description="Mean cosine over tokens; 1 is perfect.")
    relative_error: float | None = Field(description="||original - hybrid|| / ||original||; null where that is 0.")
    top1: float | None = Field(None, description="Share of positions with the same largest logit; logits only.")


class FidelityReport(_Model):
    """Measured on held-out samples, which no fit and no score has seen."""

    samples: int = Field(description="Number of held-out samples.")
    primary: str = Field(description="The output that gates such as min_fidelity look at.")
    outputs: dict[str, AgreementReport] = Field(description="Every output of the model, by name.")
    blocks: dict[str, AgreementReport] = Field(description="Output of every block that holds a site.")


class ScoreReport(_Model):
    """Sensitivity of a site, measured on the calibration samples; low is robust."""

    value: float | None = Field(description="(1 - cosine) + mse_weight * mse; null where not finite.")
    cosine: float | None = Field(description="Mean cosine of the block output, every site linearised.")
    mse: float | None = Field(description="Mean squared difference of the block output per element.")


class FitReport(_Model):
    """Parameters of a fitted kernel."""

    alpha: list[float] = Field(description="Anchor of the Taylor expansion: one for the layer, or one per head.")
    ratio: list[float] = Field(description="(delta_q delta_k) / (beta_q beta_k), all that matters of the four.")
    calibration_error: float | None = Field(
        description="Relative squared error of the module output on the calibration samples it was fitted to."
    )
    heldout_cosine: float | None = Field(
        None,
        description="Mean cosine of the attention output with the exact one on held-out samples, original inputs.",
    )


class SiteReport(_Model):
    """One attention module."""

    name: str
    tower: str
    kind: Literal["self", "cross"]
    causal: bool
    heads: int
    head_dim: int
    eligible: bool
    reason: str | None = Field(description="Why the site cannot be converted, or null.")
    converted: bool
    score: ScoreReport | None = None
    fit: FitReport | None = None


class CalibrationReport(_Model):
    """The samples behind every number."""

    source: str
    modality: str
    requested: int
    used: int = Field(description="Samples used for fits and scores.")
    held_out: int = Field(description="Samples used for fidelity only.")
    truncated: int = Field(description="Samples longer than the model takes.")
    skipped: list[dict[str, str]] = Field(description="Samples that could not be used: id and reason.")
    fingerprint: str = Field(description="SHA-256 over the sorted ids and content hashes of all samples used.")


class FlopsReport(_Model):
    """Attention FLOPs of one held-out sample (mean), all sites together, projections not counted."""

    original: float
    hybrid: float


class CostReport(_Model):
    """What the original and the hybrid cost."""

    parameters: int = Field(description="Parameters of the original.")
    parameters_added: int = Field(description="Parameters that the converted sites add.")
    tokens: dict[str, float] = Field(description="Mean number of keys per site on the held-out samples.")
    flops: FlopsReport = Field(description="All matmuls, 2 FLOPs per multiply-add.")
    flops_paper: FlopsReport = Field(description="The source paper's counting: N²D against N H (d+1)².")
    forward_ms: dict[str, float] = Field(
        description="Median wall time of a held-out sample, one at a time, eager: original and hybrid."
    )
    seconds: dict[str, float] = Field(description="Wall time of each stage of the conversion.")
    peak_memory_bytes: int = Field(description="Peak resident memory of the process so far.")
    device: str
    threads: int


class SourceReport(_Model):
    """Where the model comes from."""

    id: str
    revision: str | None
    library: str
    model_class: str
    sha256: dict[str, str] = Field(description="SHA-256 of each weight file; empty for a model given in memory.")


class Report(_Model):
    """The whole report of a conversion, or of a scoring (then ``fidelity`` is null)."""

    schema_version: Literal[1] = 1
    tool_version: str
    library_versions: dict[str, str]
    created: str = Field(description="UTC, ISO 8601.")
    source: SourceReport
    recipe: dict[str, Any]
    calibration: CalibrationReport
    sites: list[SiteReport]
    converted: list[str] = Field(description="Names of the converted sites, in order of the module tree.")
    fidelity: FidelityReport | None
    cost: CostReport | None
    warnings: list[str]
