"""What makes DINOv2-S faster end to end, and how much of its output each way keeps, side by side in one process.

Rows: the original as it is, compiled, in bfloat16 and with 8-bit weights; token merging as its authors do it (Bolya et
al., ICLR 2023) at three rates; pooled keys; kernels on all sites; our own merging, alone and with the kernel blocks.
Images are mosaics of photographs cropped to 518 px, so that no length is upscaled; nothing is fitted to them. Every way
is timed in turns with the others; speed-ups are medians over the rounds, with the least and the largest.

    python scripts/compare_speed.py --model ~/.cache/latte_convert/models/dinov2-small-saliency \
        --photos PHOTOS --json scripts/results/speed.json --markdown scripts/results/speed.md
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from latte_convert.adapters.convert import Changes
from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import merges_of
from latte_convert.artifact.load import open_artifact
from latte_convert.bench.memory import peak_memory
from latte_convert.bench.merging import Merger, mergeable
from latte_convert.bench.timing import Timed, measure
from latte_convert.conversion import analyse
from latte_convert.environment import library_versions
from latte_convert.errors import GateError
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.progress import Stopwatch
from latte_convert.recipe import Recipe
from latte_convert.selection.choice import choose_plan
from latte_convert.selection.merging import schedule
from latte_convert.task import open_task

CROP = 518
ROUNDS = {518: 7, 1036: 3, 1554: 3, 2072: 3}
IMAGES = {518: 8, 1036: 2, 1554: 2, 2072: 1}
SAMPLES = {518: 8, 1036: 4, 1554: 2, 2072: 1}
"""Mosaics that a plan is fitted to; one more is held out."""
TARGETS = {518: (1.25, 1.5, 1.8), 1036: (2.5, 1.5, 1.8), 1554: (4.5,), 2072: (6.0,)}
"""Speed-ups that plans are asked for."""
RATES = (0.031, 0.047, 0.062)
"""Tokens that token merging removes after each block, as a share of all."""
LEFT = (0.65, 0.5, 0.4)
"""Tokens that the last block works on, where we merge."""
EARLY = {1036: (3, 0.4), 1554: (4, 0.3), 2072: (6, 0.2)}
"""First sites that get ``blocks``, and tokens that the last block works on, where most are merged after the first."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way of running the model.

    Attributes:
        name: The row.
        model: What runs.
        context: Turns the model into it for a time.
        metered: Whether memory can be metered (not inside compiled code).
    """

    name: str
    model: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    metered: bool = True
    dtype: torch.dtype = torch.float32

    @torch.inference_mode()
    def run(self, pixels: Tensor) -> Tensor:
        """Last hidden state, ``(1, N, D)``."""
        out: Tensor = self.model(pixel_values=pixels.to(self.dtype)).last_hidden_state
        return out.float()


def mosaic(photos: Sequence[Path], side: int, first: int) -> Tensor:
    """Pixels ``(1, 3, side, side)``, normalised: different photographs, each resized to cover its square of 518 px."""
    count = side // CROP
    tiles = [_tile(photos[(first + index) % len(photos)]) for index in range(count**2)]
    rows = [torch.cat(tiles[row * count : (row + 1) * count], dim=2) for row in range(count)]
    mean, deviation = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((torch.cat(rows, dim=1) - mean) / deviation)[None]


def _tile(path: Path) -> Tensor:
    image = Image.open(path).convert("RGB")
    scale = CROP / min(image.size)
    image = image.resize((max(CROP, round(image.width * scale)), max(CROP, round(image.height * scale))), Image.BICUBIC)
    left, top = (image.width - CROP) // 2, (image.height - CROP) // 2
    pixels = np.asarray(image.crop((left, top, left + CROP, top + CROP)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


def ways_of(model: nn.Module, photos: Sequence[Path], side: int, options: argparse.Namespace) -> Iterator[Way]:
    """All rows at one size; plans are made for those in whose name ``options.only`` is found."""
    host, tokens = Host.of(model), (side // 14) ** 2
    sites = host.sites()
    blocks = list(dict.fromkeys(host.block(site.name) for site in sites))

    def kernels(name: str, **options: Any) -> dict[str, Kernel]:
        return {site.name: get_kernel(name)(site.heads, site.head_dim, **options) for site in sites}

    def hybrid(name: str, changes: Any, runner: nn.Module = model, dtype: torch.dtype = torch.float32) -> Way:
        return Way(name, runner, partial(Host.of(runner).convert, changes), dtype=dtype)

    yield Way("original", model)
    yield Way("original, compiled", torch.compile(copy.deepcopy(model)), metered=False)
    low = copy.deepcopy(model).bfloat16()
    yield Way("original, bfloat16", low, dtype=torch.bfloat16)
    yield Way("original, 8-bit weights", int8(model), metered=False)
    chosen = mergeable(sites, {"vision"})
    for rate in RATES:
        yield Way(f"ToMe, r = {rate:.1%} a block", model, partial(Merger, host, chosen, round(rate * tokens)))
    yield hybrid("pooled keys, 2 x 2", kernels("near_far", window=0, halo=0, far="pooled", clusters=-(-tokens // 4)))
    for name in ("monarch", "near_far", "blocks"):
        yield hybrid(f"{name}, all sites", kernels(name))
    for left in LEFT:
        yield hybrid(f"merge to {left:.0%}", merges_of(schedule(blocks, left)))
    if side in EARLY:
        first, left = EARLY[side]
        early = {site.name: get_kernel("blocks")(site.heads, site.head_dim) for site in sites[:first]}
        yield hybrid(
            f"blocks on the first {first}, merge to {left:.0%} early",
            {**early, **merges_of(schedule(blocks, left, 0.35))},
        )
    yield hybrid("merge to 50%, bfloat16", merges_of(schedule(blocks, 0.5)), low, torch.bfloat16)
    for name, changes in plans(model, photos, side, options.only):
        yield hybrid(name, changes)
    for directory in options.artifacts:
        artifact = open_artifact(directory)
        yield hybrid(f"latte, {artifact.path.name}", {**artifact.kernels, **artifact.merges})
    yield hybrid("merge to 65%, 8-bit weights", merges_of(schedule(blocks, 0.65)), int8(model))


def plans(model: nn.Module, photos: Sequence[Path], side: int, only: str) -> Iterator[tuple[str, Changes]]:
    """What the tool makes of each target speed, on mosaics of photographs that are not compared on."""
    targets = {
        target: name for target in TARGETS[side] if re.search(only, name := f"latte, --target-speedup {target:g}")
    }
    if not targets:
        return
    others = photos[IMAGES[side] * (side // CROP) ** 2 :]
    batches = [
        {"pixel_values": mosaic(others, side, index * (side // CROP) ** 2)} for index in range(SAMPLES[side] + 1)
    ]
    recipe = Recipe(samples=len(batches), holdout=1 / len(batches), target_speedup=next(iter(targets)))
    task = open_task(model, batches, recipe)
    fitted, scores = analyse(task, Stopwatch())
    for target, name in targets.items():
        try:
            task = replace(task, recipe=recipe.model_copy(update={"target_speedup": target}))
            choice = choose_plan(task, fitted, scores)
        except GateError as error:
            print(name, error, flush=True)
            continue
        left = min(choice.plan.merges.values(), default=1.0)
        names = Counter(kernel.name for kernel in choice.kernels.values())
        made = [f"{count} {kernel}" for kernel, count in names.items()] + ([f"merge to {left:.0%}"] if left < 1 else [])
        yield f"{name} ({', '.join(made)})", choice.changes


def int8(model: nn.Module) -> nn.Module:
    """Weights of linear layers in 8 bits, activations quantised as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch points to torchao for new code
        torch.backends.quantized.engine = "x86" if "x86" in torch.backends.quantized.supported_engines else "qnnpack"
        quantised: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    return quantised


Ways = Callable[[nn.Module, Sequence[Path], int, argparse.Namespace], Iterator[Way]]
"""All rows at one size, as ``ways_of``."""


def compare(
    model: nn.Module, photos: Sequence[Path], side: int, options: argparse.Namespace, ways: Ways
) -> list[dict[str, Any]]:
    """All rows at one size."""
    images = [mosaic(photos, side, index * (side // CROP) ** 2) for index in range(IMAGES[side])]
    exact = [Way("original", model).run(image) for image in images]
    rows: list[dict[str, Any]] = []
    running: dict[str, Timed] = {}
    for way in ways(model, photos, side, options):
        if not re.search(options.only, way.name) and way.name != "original":
            continue
        row: dict[str, Any] = {"way": way.name, "px": side, "images": len(images)}
        try:
            with way.context():
                found = [way.run(image) for image in images]
                if way.metered:
                    row["memory_bytes"] = peak_memory(partial(way.run, images[0]), CPU)
        except Exception as error:  # a row that says why it is empty is a result
            row["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        else:
            row["cls"] = _cosine(exact, found, slice(0, 1))
            row["patches"] = _cosine(exact, found, slice(1, None))
            running[way.name] = Timed(partial(way.run, images[0]), way.context)
        rows.append(row)
        print(row, flush=True)
    times: dict[str, list[float]] = {name: [] for name in running}
    for number in range(ROUNDS[side]):
        for name, timed in list(running.items())[:: -1 if number % 2 else 1]:
            times[name].append(measure(timed, CPU))
    for row in rows:
        if (own := times.get(row["way"])) is not None:
            ratios = sorted(a / b for a, b in zip(times["original"], own, strict=True))
            row["seconds"] = statistics.median(own)
            row["speedup"] = [statistics.median(ratios), ratios[0], ratios[-1]]
    return rows


def _cosine(exact: Sequence[Tensor], found: Sequence[Tensor], part: slice) -> float:
    cosines = [F.cosine_similarity(a[:, part], b[:, part], dim=-1).mean() for a, b in zip(exact, found, strict=True)]
    return float(torch.stack(cosines).mean())


def render(report: dict[str, Any], title: str, script: str) -> str:
    """The table as Markdown."""
    sizes = sorted({row["px"] for row in report["rows"]})
    names = list(dict.fromkeys(row["way"] for row in report["rows"]))
    found = {(row["way"], row["px"]): row for row in report["rows"]}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "not run"
        if "speedup" not in row:
            return row.get("reason", "not run")
        middle, low, high = row["speedup"]
        memory = f", {row['memory_bytes'] / 2**20:.0f} MiB" if "memory_bytes" in row else ""
        return f"{middle:.2f}x ({low:.2f}-{high:.2f}), {row['cls']:.4f} / {row['patches']:.4f}{memory}"

    lines = [
        f"# {title}",
        "",
        f"Speed-up over the original (median, least and largest of the rounds), CLS / patch cosine, peak memory of the "
        f"activations. {report['threads']} threads, float32 unless said; mosaics of photographs that nothing was "
        f"fitted to; made by `scripts/{script}`. {report['note']}".rstrip(),
        "",
        "| | " + " | ".join(f"{side} px, {(side // 14) ** 2 + 1:,} tokens" for side in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    lines += [f"| {name} | " + " | ".join(cell(found.get((name, side))) for side in sizes) + " |" for name in names]
    return "\n".join(lines) + "\n"


def main(ways: Ways, title: str, description: str | None, script: str) -> None:
    """Measure each size and write what was found after each, so that an interruption keeps the finished ones."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--photos", required=True, type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=sorted(ROUNDS))
    parser.add_argument("--only", default="", help="rows in whose name this regular expression is found")
    parser.add_argument(
        "--artifacts", type=Path, nargs="+", default=[], help="rows of hybrids that were converted before"
    )
    parser.add_argument("--note", default="", help="what a reader of the table must know of this run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    photos = sorted(path for path in arguments.photos.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    model = transformers.AutoModel.from_pretrained(arguments.model).eval()
    report: dict[str, Any] = {
        "threads": torch.get_num_threads(), "versions": library_versions(), "note": arguments.note, "rows": []
    }  # fmt: skip
    if arguments.json and arguments.json.exists():
        earlier = json.loads(arguments.json.read_text())["rows"]
        report["rows"] = [row for row in earlier if row["px"] not in arguments.sizes]
    for side in arguments.sizes:
        report["rows"] += compare(model, photos, side, arguments, ways)
        report["rows"].sort(key=lambda row: row["px"])
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if arguments.markdown:
            arguments.markdown.write_text(render(report, title, script), encoding="utf-8")


if __name__ == "__main__":
    main(ways_of, "What makes DINOv2-S faster, end to end", __doc__, "compare_speed.py")
