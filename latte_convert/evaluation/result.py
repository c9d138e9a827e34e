"""What ``latte eval --json`` prints. Strict JSON: a number that cannot be given is null, with a reason beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MetricReport(_Model):
    """One metric of the hybrid beside the original's, on the same samples."""

    original: float
    hybrid: float
    lower_is_better: bool = Field(description="Whether it is an error rate; its retention is that of 1 - value.")
    retention: float | None = Field(description="max(0, hybrid) / original; null where the original's is not positive.")
    interval: tuple[float, float] | None = Field(
        description="95% percentile interval of the retention, from a paired bootstrap over samples."
    )
    reason: str | None = Field(None, description="Why retention or interval is null, or the interval has no width.")


class SkippedReport(_Model):
    """A sample that could not be used."""

    id: str
    reason: str


class GateReport(_Model):
    """A gate that was asked for."""

    metric: str
    fail_under: float
    passed: bool


class EvalReport(_Model):
    """A whole evaluation."""

    schema_version: Literal[1] = 1
    tool_version: str
    library_versions: dict[str, str]
    artifact: str = Field(description="The directory that was evaluated.")
    artifact_fingerprint: str | None = Field(
        None, description="Of the artifact, over its files and kernels; null where an older version measured."
    )
    source: str = Field(description="The checkpoint it was made from.")
    model_class: str
    task: str
    data: list[str] = Field(description="Where the samples are, as the user wrote it.")
    samples: int = Field(description="Samples that the metrics rest on.")
    skipped: list[SkippedReport]
    truncated: int = Field(description="Samples longer than the model takes.")
    primary: str = Field(description="The metric that the gate looks at.")
    metrics: dict[str, MetricReport]
    note: str = Field(description="How to read the metrics, where that is not obvious.")
    unused_sites: list[str] = Field(description="Converted sites that this task does not run.")
    exact_sites: list[str] = Field(
        description="Converted sites that ran softmax throughout: too few tokens for anything else to be cheaper."
    )
    exact_share: float | None = Field(
        None,
        description="Share of the calls of converted sites that ran softmax; at 1 the hybrid is the original here.",
    )
    resamples: int = Field(description="Of the bootstrap.")
    seed: int
    batch_size: int
    device: str
    seconds: dict[str, float] = Field(description="Wall time: load (data and weights), run (both models), score.")
    gate: GateReport | None
