"""Speed and memory over sequence lengths, as ratios to the original, so that a gain of a few percent can be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from latte_convert.bench.result import BenchReport, Crossover, LengthResult, VariantResult
from latte_convert.report.axes import Tick, length_axis, ratio_axis
from latte_convert.report.charts import Chart, Dot, Series

VARIANTS: dict[str, str] = {
    "original": "original",
    "hybrid": "hybrid",
    "hybrid_compiled": "hybrid, compiled kernels",
    "pooled": "pooled tokens",
    "merged": "merged tokens",
}
"""What the page calls a variant of ``latte bench``; the order gives each its colour, mark and dash in every chart."""


@dataclass(frozen=True)
class Measure:
    """A quantity of ``latte bench``, as a ratio to the original's at the same length: 1 is as the original."""

    title: str
    name: str
    ratio: Callable[[VariantResult, VariantResult], float | None]
    crossovers: Callable[[BenchReport], Mapping[str, Crossover | None]]


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def _quotient(above: int | None, below: int | None) -> float | None:
    return above / below if above and below else None


MEASURES = (
    Measure(
        "Speed of the whole model",
        "Speed-up over the original",
        lambda _, variant: _inverse(variant.forward_ratio),
        lambda bench: {"hybrid": bench.crossover, "compiled": bench.crossover_compiled},
    ),
    Measure(
        "Speed of the attention of the converted sites",
        "Speed-up over the original",
        lambda _, variant: _inverse(variant.attention_ratio),
        lambda bench: {"hybrid": bench.crossover_attention},
    ),
    Measure(
        "Memory of a forward pass",
        "Peak memory over the original's",
        lambda original, variant: _quotient(variant.forward_memory_bytes, original.forward_memory_bytes),
        lambda _: {},
    ),
    Measure(
        "Memory of the largest attention call",
        "Peak memory over the original's",
        lambda original, variant: _quotient(variant.attention_memory_bytes, original.attention_memory_bytes),
        lambda _: {},
    ),
)


def bench_charts(bench: BenchReport | None) -> list[Chart]:
    """Speed and memory over sequence lengths, what was measured of them."""
    charts = [bench_chart(bench, measure) for measure in MEASURES] if bench else []
    return [chart for chart in charts if chart is not None]


def bench_chart(bench: BenchReport, measure: Measure) -> Chart | None:
    """One measure over the sequence lengths; None where nothing was measured."""
    lengths = sorted(bench.lengths, key=lambda length: length.tokens)
    rows = {name: _ratios(lengths, name, measure) for name in VARIANTS if name != "original"}
    rows = {name: pairs for name, pairs in rows.items() if pairs}
    if not rows:
        return None
    measured = [tokens for pairs in rows.values() for tokens, _ in pairs]
    return Chart(
        title=measure.title,
        summary=f"{len(rows)} variants, {min(measured):,} to {max(measured):,} tokens. The table has the numbers.",
        x=length_axis("Tokens, logarithmic", measured),
        y=ratio_axis(measure.name, [ratio for pairs in rows.values() for _, ratio in pairs]),
        series=tuple(
            Series(
                label=VARIANTS[name],
                style=list(VARIANTS).index(name),
                dots=tuple(Dot(tokens, ratio, f"{tokens:,} tokens: {ratio:.3g}x") for tokens, ratio in pairs),
                line=True,
            )
            for name, pairs in rows.items()
        ),
        rules=tuple(
            Tick(found.tokens, f"{name} is faster from {found.tokens:,} tokens on")
            for name, found in measure.crossovers(bench).items()
            if found and found.tokens
        ),
        level=Tick(1.0, "as the original"),
    )


def _ratios(lengths: Sequence[LengthResult], name: str, measure: Measure) -> list[tuple[int, float]]:
    """Pairs of tokens and ratio to the original, of the lengths at which both were measured."""
    pairs = []
    for length in lengths:
        variants = {variant.name: variant for variant in length.variants}
        original, variant = variants.get("original"), next((v for v in length.variants if v.name == name), None)
        ratio = measure.ratio(original, variant) if original and variant else None
        if ratio is not None and math.isfinite(ratio) and ratio > 0:
            pairs.append((length.tokens, ratio))
    return pairs
