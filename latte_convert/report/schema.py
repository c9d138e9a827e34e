"""What ``report.json`` holds. Published as JSON Schema by ``latte schema``.

Strict JSON throughout: a number that could not be measured is null, and a ``reason`` beside it says why.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from latte_convert.bench.result import BenchReport
from latte_convert.evaluation.result import EvalReport
from latte_convert.measuring.map_result import AttentionMap


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AgreementReport(_Model):
    """Agreement of the hybrid with the original on the same inputs."""

    cosine: float = Field(description="Mean cosine over tokens; 1 is perfect.")
    relative_error: float | None = Field(description="||original - hybrid|| / ||original||; null where that is 0.")
    top1: float | None = Field(None, description="Share of positions with the same largest logit; logits only.")
    agreed: float | None = Field(
        None,
        description="Of logits, the mean probability that both give to the same classes; of boxes, the mean "
        "intersection over union, each weighed by how sure the original is of it.",
    )
    divergence: float | None = Field(None, description="Mean KL(original || hybrid) in nats; logits only.")
    distance: float | None = Field(None, description="Mean L1 distance of boxes, weighed as in agreed.")
    likeness: float | None = Field(None, description="What gates look at: the worse of cosine and agreed.")
    interval: tuple[float, float] | None = Field(
        None, description="95% bootstrap interval of the likeness over the samples; null for fewer than two."
    )

    @property
    def alike(self) -> float:
        """The likeness; the cosine where an older version wrote the report."""
        return self.cosine if self.likeness is None else self.likeness

    @property
    def measure(self) -> str:
        """What the likeness is, in words."""
        if self.agreed is None or self.alike > self.agreed:
            return "mean cosine"
        return "mean overlap of boxes" if self.distance is not None else "mean probability of the same classes"


class FidelityReport(_Model):
    """Measured on held-out samples, which fits and scores never see."""

    samples: int = Field(description="Number of held-out samples.")
    primary: str = Field(description="The final output that is least alike: gates such as min_fidelity look at it.")
    outputs: dict[str, AgreementReport] = Field(description="Every output of the model, by name.")
    blocks: dict[str, AgreementReport] = Field(description="Output of every block that holds a site.")

    @property
    def least(self) -> AgreementReport:
        """The agreement of the primary output: the fidelity of the hybrid."""
        return self.outputs[self.primary]


class ScoreReport(_Model):
    """Sensitivity of a site, measured on the calibration samples; low is robust."""

    value: float | None = Field(
        description="By the recipe's scorer. paper: (1 - cosine) + mse_weight * mse of the block; isolated and greedy: "
        "squared change of the final output over its variance. Null where not finite."
    )
    cosine: float | None = Field(description="Mean cosine of the output that the scorer compares.")
    mse: float | None = Field(description="Mean squared difference of that output per element.")


class FitReport(_Model):
    """A fitted kernel."""

    kernel: str = Field(description="Name of the kernel.")
    options: dict[str, Any] = Field(description="Its settings, as the manifest records them.")
    parameters: dict[str, list[float]] = Field(
        description="Fitted scalars, one for the layer or one per head, such as alpha and ratio of latte."
    )
    legend: str = Field("", description="What these scalars are.")
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
    head_dim: int = Field(description="Channels per head of query and key.")
    value_dim: int | None = Field(None, description="Channels per head of value, where they are not as many.")
    layout: str | None = Field(
        None,
        description="How the tokens of its first call lay: '37 x 37 + 1 prefix', '8 x 14 x 14' or 'sequence'; null "
        "where none was seen.",
    )
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
    processors: list[dict[str, str]] = Field(
        default_factory=list, description="What prepared them: class, backend and versions, one for each modality."
    )


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


class AttentionTimeReport(_Model):
    """How much of a pass over one calibration sample is softmax attention, and so the most that kernels can gain."""

    tokens: int = Field(description="Most keys of a call.")
    original_ms: float = Field(description="Wall time of the original.")
    without_ms: float = Field(description="Wall time with the attention of all eligible sites left out.")
    said: str = Field(description="In words, with what is foretold for longer inputs.")


class SourceReport(_Model):
    """Where the model comes from."""

    id: str
    revision: str | None
    library: str
    model_class: str
    sha256: dict[str, str] = Field(description="SHA-256 of each weight file; empty for a model given in memory.")


class FrontierPoint(_Model):
    """A plan that was weighed: what it would cost, and how far it was from the original."""

    converted: int = Field(description="Number of sites it converts.")
    kernels: dict[str, int] = Field(description="How many of them each kernel gets.")
    flops_share: float = Field(description="Attention FLOPs of the eligible sites over those of exact attention.")
    predicted_error: float | None = Field(description="Squared error of the final output over its variance.")
    cosine: float | None = Field(description="Mean cosine of the final output on a few calibration samples.")
    chosen: bool = Field(description="Whether this plan was carried out.")
    tokens_left: float = Field(1.0, description="Share of its tokens that the last merged block works on.")


class HeadStripes(_Model):
    """Stripes of one head: the exact attention, every row scaled to unit length, fitted by 1 s_c^T + s_r 1^T."""

    column_strength: float = Field(description="Share of the energy in the column stripe 1 s_c^T.")
    row_strength: float = Field(description="Share of the energy in the row stripe s_r 1^T.")
    keys: list[int] = Field(description="Tokens with a column stripe, strongest first; -1 is a sequence's last one.")
    queries: list[int] = Field(description="Tokens with a row stripe, strongest first; -1 is a sequence's last one.")


class StripesReport(_Model):
    """Column and row stripes of the exact attention of every site that was looked at."""

    sites: dict[str, list[HeadStripes]] = Field(description="One entry per head, by site.")
    correlation: float | None = Field(
        description="Rank correlation of a site's stripe strength with its sensitivity; null with too few sites."
    )


class Report(_Model):
    """The whole report of a conversion, or of a scoring (then ``fidelity`` is null)."""

    schema_version: Literal[1] = 1
    tool_version: str
    library_versions: dict[str, str]
    created: str = Field(description="UTC, ISO 8601.")
    artifact_fingerprint: str | None = Field(
        None,
        description="Of the artifact it was saved in, over its files and kernels; null without one, or where an older "
        "version wrote it.",
    )
    source: SourceReport
    recipe: dict[str, Any]
    calibration: CalibrationReport
    sites: list[SiteReport]
    min_tokens: int | None = Field(
        None, description="Below so many keys the artifact runs exact attention; null where it is the recipe's."
    )
    converted: list[str] = Field(description="Names of the converted sites, in order of the module tree.")
    merges: dict[str, float] = Field(
        default_factory=dict,
        description="Share of its tokens that each block works on whose tokens are merged, in order of execution.",
    )
    attention: AttentionTimeReport | None = Field(None, description="Null in reports of older versions.")
    fidelity: FidelityReport | None
    cost: CostReport | None
    warnings: list[str]
    frontier: list[FrontierPoint] | None = Field(None, description="Plans that were weighed against each other.")
    maps: list[AttentionMap] | None = Field(None, description="Attention of some heads on one held-out sample.")
    stripes: StripesReport | None = None
    bench: BenchReport | None = Field(None, description="What latte bench measured.")
    evaluations: list[EvalReport] | None = Field(None, description="What latte eval measured.")

    @property
    def changed(self) -> bool:
        """Whether the hybrid is anything else than the original."""
        return bool(self.converted or self.merges)

    @property
    def made(self) -> str:
        """What was done, in words: sites and, where tokens are merged, how many are left."""
        sites = f"{len(self.converted)} of {len(self.sites)} attention sites converted"
        if not self.merges:
            return sites
        return f"{sites}, tokens merged to {min(self.merges.values()):.0%} over {len(self.merges)} blocks"

    def __repr__(self) -> str:
        """What was converted, how close it is and what it costs, in a few lines; ``model_dump`` has all of it."""
        from latte_convert.report.summary import summarise

        return summarise(self)

    __str__ = __repr__
