"""What conversion costs the two models that this project trains: detection AP and retrieval R@1, original and hybrid.

    python scripts/measure_tiny.py [--config FILE] [--samples 64] [--ratio 0.67] [--json FILE] [--markdown FILE]

Calibrates on training scenes and measures on held-out ones, with the metric code of the training scripts: COCO AP by
pycocotools for ``tiny-detr`` (encoder, decoder and cross-attention), recall on held-out pairs for ``tiny-clip`` (both
towers).
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import train_tiny_clip
import train_tiny_detr
from PIL import Image
from scenes import render, write_scenes

from latte_convert import Recipe, Result, convert

HELD_OUT = 300


def main() -> None:
    """Measure both models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("tests/models"))
    parser.add_argument("--config", type=Path, default=Path("configs/default.yaml"))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--ratio", type=float, default=0.67)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    recipe = Recipe.from_yaml(arguments.config, samples=arguments.samples, ratio=arguments.ratio)
    rows = [*detection(arguments.models / "tiny-detr", recipe), *retrieval(arguments.models / "tiny-clip", recipe)]
    print(text := table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")


def detection(model: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """AP and AP50 of the tiny DETR on held-out scenes."""
    scenes = [render("heldout", 10_000 + index) for index in range(HELD_OUT)]
    original, processor = train_tiny_detr.load(model)
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(Path(folder) / "scenes", "train", recipe.samples)
        result = convert(model, Path(folder) / "scenes", recipe=recipe)
    before = train_tiny_detr.evaluate(original, processor, scenes)
    after = train_tiny_detr.evaluate(result.model, processor, scenes)
    return [row(model.name, result, metric, before[metric], after[metric]) for metric in ("AP50", "AP")]


def retrieval(model: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Recall of the tiny CLIP on held-out pairs, image to text and text to image."""
    parts = train_tiny_clip.load(model)
    with tempfile.TemporaryDirectory() as folder:
        result = convert(model, list(write_pairs(Path(folder), recipe.samples)), recipe=recipe)
    before = train_tiny_clip.evaluate(parts)
    after = train_tiny_clip.evaluate(parts._replace(model=result.model))
    return [
        row(model.name, result, f"{way} R@1", before[f"{way}_r1"], after[f"{way}_r1"])
        for way in ("image_to_text", "text_to_image")
    ]


def write_pairs(folder: Path, count: int) -> tuple[Path, Path]:
    """Write training pairs as a folder of images and a file of captions."""
    pairs = itertools.islice(itertools.chain.from_iterable(train_tiny_clip.batches("train", 32, 7)), count)
    images, texts = folder / "images", folder / "captions.txt"
    images.mkdir()
    captions = []
    for index, pair in enumerate(pairs):
        Image.fromarray(pair.image).save(images / f"{index:03d}.png")
        captions.append(pair.caption)
    texts.write_text("\n".join(captions) + "\n")
    return images, texts


def row(model: str, result: Result, metric: str, original: float, hybrid: float) -> dict[str, Any]:
    """One line of the table."""
    eligible = [site for site in result.report.sites if site.eligible]
    towers = sorted({f"{site.tower} {site.kind}" for site in eligible if site.converted})
    return {
        "model": model,
        "converted": f"{len(result.report.converted)} of {len(eligible)}",
        "where": ", ".join(towers),
        "metric": metric.replace("_", " "),
        "original": original,
        "hybrid": hybrid,
        "retention": hybrid / original if original else None,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | sites converted | metric | original | hybrid | retained |", "|---|---|---|---|---|---|"]
    for one in rows:
        retained = f"{one['retention']:.1%}" if one["retention"] is not None else "-"
        lines.append(
            f"| {one['model']} | {one['converted']} ({one['where']}) | {one['metric']} | {one['original']:.3f} "
            f"| {one['hybrid']:.3f} | {retained} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
