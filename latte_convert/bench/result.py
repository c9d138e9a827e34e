"""What ``latte bench`` measured, as ``--json`` prints it and ``bench.json`` keeps it. Strict JSON: null, never NaN."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

VariantName = Literal["original", "hybrid", "hybrid_compiled", "pooled", "merged"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Timing(_Model):
    """Wall time of one call, batch size 1, after warm-up, device synchronised."""

    median_ms: float
    lower_ms: float = Field(description="First quartile.")
    upper_ms: float = Field(description="Third quartile.")
    rounds: int = Field(description="Number of measurements; the variants take turns in each round.")


class Operations(_Model):
    """FLOPs of the attention of all converted sites, projections not included, 2 per multiply-add."""

    formula: int = Field(description="By the kernels' formulas, which count visible pairs where a site is causal.")
    measured: int = Field(description="By torch.utils.flop_counter, which counts what runs.")


class VariantResult(_Model):
    """One way of computing the converted sites, at one length."""

    name: VariantName
    detail: str = Field("", description="Its settings, such as the backend that SDPA chose.")
    forward: Timing | None = Field(None, description="End to end: the whole model, or the tower of these inputs.")
    attention: Timing | None = Field(None, description="The converted sites alone, on the model's own q, k and v.")
    forward_ratio: float | None = Field(
        None, description="Time over the original's, median over rounds; below 1 is faster."
    )
    attention_ratio: float | None = None
    forward_memory_bytes: int | None = Field(
        None, description="Peak of what a forward allocates on top of weights and inputs."
    )
    attention_memory_bytes: int | None = Field(None, description="The same of the largest single attention call.")
    flops: Operations | None = None
    cosine: float | None = Field(None, description="Mean cosine of the model's primary output with the original's.")
    exact_share: float | None = Field(
        None, description="Share of the attention calls of a hybrid that run softmax at this length; 1 is the original."
    )
    reason: str | None = Field(None, description="Why something, or all of it, was not measured.")


class LengthResult(_Model):
    """All variants at one sequence length."""

    label: str = Field(description="As the user knows it: '518 px', '128 tokens', '30 s'.")
    resolution: int | None = Field(description="Height and width of images in pixels.")
    tokens: int = Field(description="Largest number of keys of a converted site.")
    sites: int = Field(description="Converted sites that these inputs reach.")
    variants: list[VariantResult]

    def variant(self, name: VariantName) -> VariantResult | None:
        """The result of one variant, or None where it was not asked for."""
        return next((v for v in self.variants if v.name == name), None)


class Crossover(_Model):
    """Number of tokens from which on a variant was faster than the original at every length, by their quartiles."""

    tokens: int | None = Field(description="Null where it was not faster at the longest, or too few were measured.")
    bracketed: bool = Field(description="Whether a shorter length was measured at which it was not faster.")


class Guard(_Model):
    """The hybrid below ``min_tokens``, where it runs the exact branch."""

    tokens: int
    forward_ratio: float
    identical: bool = Field(description="Whether every output equals the original's, bit by bit.")


class BenchReport(_Model):
    """One run of ``latte bench``."""

    schema_version: Literal[1] = 1
    tool_version: str
    library_versions: dict[str, str]
    created: str = Field(description="UTC, ISO 8601.")
    artifact: str = Field(description="Name of the artifact's directory.")
    artifact_fingerprint: str | None = Field(
        None, description="Of the artifact, over its files and kernels; null where an older version measured."
    )
    source: str = Field(description="Id of the original.")
    modality: str
    data: str | None = Field(
        description="Where samples came from; null for synthetic ones, of which no cosines are taken."
    )
    device: str
    threads: int
    dtype: str
    lengths: list[LengthResult]
    crossover: Crossover = Field(description="End to end, hybrid as it is loaded.")
    crossover_compiled: Crossover | None = Field(description="End to end, kernels compiled.")
    crossover_attention: Crossover = Field(description="Attention of the converted sites alone.")
    guard: list[Guard] = Field(description="Lengths below the crossover, with min_tokens set to it.")
    statements: list[str]
    min_tokens_written: int | None = Field(description="What --write stored, or null.")
    seconds: float
