"""How much of a real model survives conversion: held-out fidelity against the number of sites converted.

    python scripts/measure_fidelity.py --models DIR --data DIR [--only NAME] [--json FILE] [--markdown FILE]

For DINOv2-S (518 px), MiniLM-L6 and Whisper tiny.en with the default recipe: cosine and relative error of the final
output on held-out samples with a third, two thirds and all of the eligible sites converted; for DINOv2 also what its
user sees, the Pearson correlation of the saliency maps. ``--data`` holds ``coco_val128/images``,
``stsb/stsb-en-test.csv`` and ``an4_windows``. Models are those of ``scripts/fetch_models.py``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from latte_convert.conversion import analyse
from latte_convert.evaluation.fidelity import measure
from latte_convert.job import Job, prepare
from latte_convert.recipe import Recipe
from latte_convert.rewrite.apply import apply
from latte_convert.selection.policy import select

MODELS = {
    "dinov2-small-saliency": ("coco_val128/images", 32),
    "minilm-l6": ("stsb/stsb-en-test.csv", 64),
    "whisper-tiny.en": ("an4_windows", 14),
}
RATIOS = (1 / 3, 2 / 3, 1.0)


def main() -> None:
    """Measure every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.only or MODELS:
        data, samples = MODELS[name]
        rows += evaluate(arguments.models / name, arguments.data / data, samples)
    text = table(rows)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")


def evaluate(model: Path, data: Path, samples: int) -> list[dict[str, Any]]:
    """Fit and score once, then measure each number of converted sites."""
    job = prepare(model, data, Recipe(samples=samples))
    analyse(job)
    rows = []
    for ratio in RATIOS:
        plan = select(
            job.sites, {n: s.value for n, s in job.scores.items()}, job.recipe.model_copy(update={"ratio": ratio})
        )
        kernels = job.kernels(plan.converted)
        fidelity = measure(job.model, job.adapter, job.eligible, kernels, job.holdout)
        primary = fidelity.outputs[fidelity.primary]
        row = {
            "model": model.name,
            "sites": len(plan.converted),
            "eligible": len(job.eligible),
            "held_out": len(job.holdout),
            "output": fidelity.primary,
            "cosine": primary.cosine,
            "relative_error": primary.relative_error,
            "outputs": {name: agreement.cosine for name, agreement in fidelity.outputs.items()},
        }
        decoder = model / "saliency_decoder.onnx"
        if decoder.is_file():
            row["saliency_pearson"] = saliency_correlation(job, kernels, decoder)
        rows.append(row)
        print(f"{row['model']} {row['sites']}/{row['eligible']}: cosine {row['cosine']:.4f}", flush=True)
    return rows


def saliency_correlation(job: Job, kernels: Any, decoder: Path) -> float:
    """Mean Pearson correlation of the saliency maps of original and hybrid on the held-out images."""
    from real_models.dinov2 import saliency, session

    run = session(decoder.read_bytes())
    correlations = []
    for inputs in job.holdout:
        original = saliency(job.model, run, inputs.kwargs["pixel_values"])
        with apply(job.model, job.adapter, kernels):
            hybrid = saliency(job.model, run, inputs.kwargs["pixel_values"])
        correlations.append(np.corrcoef(np.ravel(original), np.ravel(hybrid))[0, 1])
    return float(np.mean(correlations))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| model | sites converted | held-out samples | output | cosine | relative error | saliency map, Pearson |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pearson = f"{row['saliency_pearson']:.2f}" if "saliency_pearson" in row else "-"
        lines.append(
            f"| {row['model']} | {row['sites']} of {row['eligible']} | {row['held_out']} | `{row['output']}` "
            f"| {row['cosine']:.3f} | {row['relative_error']:.3f} | {pearson} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
