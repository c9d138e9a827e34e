"""What converting every attention layer of the small diffusion transformer does to its samples.

    python scripts/compare_dit.py [--model tests/models/tiny-dit] [--pictures 10 4] [--threads 2]
    python scripts/compare_dit.py --timings [--rounds 5]    # on a quiet machine: the time of a step, and nothing else

Kernels are calibrated on what the sampler calls the original with at 64 px (1,024 tokens), over all times, and serve
128 px (4,096 tokens) too. Original and hybrids draw the same digits from the same noise. The classifier that was
trained with the model compares them: the cosine distance of its features, and whether it reads the same digit. Writes
``dit.json``, ``dit.md`` and ``dit.png``, the pictures side by side.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F
from train_tiny_dit import NOTHING, SIDES, STEPS, Classifier, font, load, sample

from latte_convert import Recipe, convert, record_calls
from latte_convert.bench.timing import Timed, take_turns, timing

HERE = Path(__file__).resolve().parent
RECIPES = {
    "near_far": Recipe(kernel="near_far"),
    "latte, as published": Recipe.from_yaml("paper"),
    "blocks": Recipe(kernel="blocks"),
    "latte, all free": Recipe.from_yaml("linear"),
}
"""What every layer becomes."""
ORIGINAL, LOW, OTHER = "original", "original, bfloat16", "original, other noise"
SEED, CALIBRATION_SEED = 0, 10_000
CELL = 96
"""Pixels of a sample in the picture."""


def main() -> None:
    """Measure, or take times; then render all that is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE.parent / "tests" / "models" / "tiny-dit")
    parser.add_argument("--pictures", type=int, nargs=2, default=(10, 4), help="at 1,024 and at 4,096 tokens")
    parser.add_argument("--timings", action="store_true", help="take the time of a step only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.out / "dit.json"
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if options.timings:
        report["timings"] = time_steps(options.model, options.rounds)
    else:
        report |= {"pictures": list(options.pictures), "steps": STEPS}
        for report["rows"], images in compare(options.model, options.pictures):
            draw(images).save(options.out / "dit.png", optimize=True)
            file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (options.out / "dit.md").write_text(render(report), encoding="utf-8")
    print(render(report))


def calls(model: nn.Module, samples: int = 6, side: int = SIDES[0]) -> list[dict[str, Any]]:
    """What the sampler calls the model with, at times all over the way from noise to picture."""
    with record_calls(model, every=3) as batches:  # which divides no number of steps here: other times in each sample
        for number in range(samples):
            sample(model, [number % 10], side, seed=CALIBRATION_SEED + number)
    return batches


def hybrids(folder: Path) -> Iterator[tuple[str, nn.Module, float]]:
    """Each recipe's model with all layers converted, and its share of the exact attention FLOPs."""
    batches = calls(load(folder)[0])
    for name, recipe in RECIPES.items():
        model, _ = load(folder)
        everything = recipe.model_copy(update={"ratio": 1.0, "samples": len(batches), "scorer": "paper"})
        result = convert(model, batches, recipe=everything, progress=False)
        assert len(result.report.converted) == len(model.transformer_blocks)
        flops = result.report.cost.flops
        yield name, result.model, flops.hybrid / flops.original


def compare(folder: Path, pictures: Sequence[int]) -> Iterator[tuple[dict[str, Any], dict[str, dict[int, Tensor]]]]:
    """Rows by name, and the samples of each by size; one more each time."""
    model, classifier = load(folder)
    labels = {side: [n % 10 for n in range(count)] for side, count in zip(SIDES, pictures, strict=True)}
    images = {ORIGINAL: {side: sample(model, labels[side], side, SEED) for side in SIDES}}
    rows: dict[str, Any] = {}

    def add(name: str, made: dict[int, Tensor], share: float | None = None) -> None:
        rows[name] = {"flops": share} | {
            str(side): likeness(classifier, images[ORIGINAL][side], made[side], labels[side]) for side in made
        }
        print(name, json.dumps(rows[name]), flush=True)

    add(ORIGINAL, images[ORIGINAL])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        add(LOW, {side: sample(model, labels[side], side, SEED) for side in SIDES})
    add(OTHER, {SIDES[0]: sample(model, labels[SIDES[0]], SIDES[0], SEED + pictures[0])})
    for name, hybrid, share in hybrids(folder):
        images[name] = {side: sample(hybrid, labels[side], side, SEED) for side in SIDES}
        add(name, images[name], share)
        yield rows, images


@torch.no_grad()
def likeness(classifier: Classifier, original: Tensor, made: Tensor, labels: Sequence[int]) -> dict[str, float]:
    """How alike two sets of samples are to the classifier; ``read`` is how many of ``made`` show what was asked."""
    seen, wanted = classifier(made).argmax(1), classifier(original).argmax(1)
    cosine = F.cosine_similarity(classifier.features(original), classifier.features(made), dim=1)
    return {
        "distance": float(1 - cosine.mean()),
        "agreement": float((seen == wanted).float().mean()),
        "read": float((seen == torch.tensor(labels)).float().mean()),
        "pixels": float((original - made).square().mean().sqrt() / 2),
    }


def time_steps(folder: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of one step of one guided picture, by number of tokens, precision and model."""
    models = {ORIGINAL: load(folder)[0], **{name: model for name, model, _ in hybrids(folder)}}
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "processor": platform.processor() or "unknown"}
    for side in SIDES:
        inputs = torch.randn(2, 3, side, side), torch.full((2,), 500.0), torch.tensor([3, NOTHING])
        for precision, context in (("float32", nullcontext), ("bfloat16", low)):
            timed = {name: Timed(step(model, inputs), context) for name, model in models.items()}
            times = take_turns(timed, torch.device("cpu"), rounds=rounds, seconds=1e9)
            found[f"{tokens(side)} {precision}"] = {name: timing(each).median_ms for name, each in times.items()}
    return found


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """One call of the model."""
    return torch.no_grad()(lambda: model(*inputs))


def low() -> AbstractContextManager[Any]:
    """Autocast to bfloat16."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def tokens(side: int) -> str:
    """Number of tokens of a picture."""
    return f"{(side // 2) ** 2:,}"


def draw(images: Mapping[str, Mapping[int, Tensor]]) -> Image.Image:
    """A row for each model, its name on the left; one block of rows for each size."""
    columns = min(10, max(len(made[side]) for made in images.values() for side in made))
    text, gap, margin = font("DejaVuSans", 15), 24, 170
    height = len(SIDES) * (gap + len(images) * CELL)
    sheet = Image.new("RGB", (margin + columns * CELL, height), "white")
    pen, top = ImageDraw.Draw(sheet), 0
    for side in SIDES:
        pen.text((4, top + 4), f"{tokens(side)} tokens, {side} px", fill="black", font=text)
        top += gap
        for name, made in images.items():
            pen.text((4, top + CELL // 2 - 8), name, fill="black", font=text)
            for column in range(min(columns, len(made[side]))):
                pixels = ((made[side][column] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
                sheet.paste(Image.fromarray(pixels).resize((CELL, CELL)), (margin + column * CELL, top))
            top += CELL
    return sheet


def render(report: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    first, second = report["pictures"]
    lines = [
        "# A diffusion transformer with every attention layer converted",
        "",
        "The model of `scripts/train_tiny_dit.py`; made by `scripts/compare_dit.py`. Kernels are calibrated on calls "
        f"of the sampler at 1,024 tokens. {first} pictures at 1,024 tokens and {second} at 4,096, {report['steps']} "
        "steps, the same digits from the same noise, float32. The classifier that was trained with the model sees "
        "them: `distance` is the mean cosine distance of its features from those of the original's sample, `agree` the "
        "share of samples that it reads as it reads the original's, `right` the share that shows the digit asked for; "
        "`pixels` is the root mean square difference, of the range of a pixel. `attention` is what is left of the "
        "exact attention FLOPs at 1,024 tokens.",
        "",
        "| every layer | attention | 1,024 tokens: distance | agree | right | pixels | 4,096 tokens: distance | agree "
        "| right | pixels |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        cells = ["" if row["flops"] is None else f"{row['flops']:.0%}"]
        for side in map(str, SIDES):
            found = row.get(side)
            cells += (
                ["", "", "", ""]
                if found is None
                else [
                    f"{found['distance']:.4f}",
                    f"{found['agreement']:.0%}",
                    f"{found['read']:.0%}",
                    f"{found['pixels']:.3f}",
                ]
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if times := report.get("timings"):
        kinds = [key for key in times if key not in ("threads", "processor")]
        lines += [
            "",
            f"Milliseconds of a step of one guided picture (two samples), {times['threads']} threads, median.",
            "",
            f"| | {' | '.join(kinds)} |",
            "|---" * (len(kinds) + 1) + "|",
        ]
        lines += [
            f"| {name} | {' | '.join(f'{times[kind][name]:.0f}' for kind in kinds)} |" for name in times[kinds[0]]
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
