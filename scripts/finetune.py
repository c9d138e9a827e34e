"""How much of what an all-sites LATTE conversion of DINOv2-S loses comes back by one epoch on unlabelled photos.

The hybrid learns from the original: its last hidden state is to point where the original's does, token by token. All
its parameters are trained, those of the kernels too. Training photos and the held-out ones, on which cosines are
measured, are different folders. Writes ``finetune.json`` and ``finetune.md``.

    python scripts/finetune.py --model ~/.cache/latte_convert/models/dinov2-small-saliency \
        --train DATA/clothing/train --heldout DATA/clothing/test
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import latte_convert

HERE = Path(__file__).resolve().parent
BATCH = 8


def main() -> None:
    """Convert, measure, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--train", required=True, type=Path, help="folder of photos, with folders in it or not")
    parser.add_argument("--heldout", required=True, type=Path)
    parser.add_argument("--px", type=int, default=224)
    parser.add_argument("--most", type=int, default=240, help="training photos; a quarter as many are held out")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    train, heldout = photos_in(options.train)[: options.most], photos_in(options.heldout)[: options.most // 4]
    recipe = latte_convert.Recipe(kernel="latte", ratio=1.0, samples=16, resolution=options.px, scorer="paper")
    hybrid = latte_convert.convert(options.model, options.train, recipe=recipe, progress=False).model
    original = transformers.AutoModel.from_pretrained(options.model).eval()
    held = [pixels(heldout[i : i + BATCH], options.px) for i in range(0, len(heldout), BATCH)]
    before = cosines(original, hybrid, held)
    print("converted", before, flush=True)
    learn(original, hybrid, train, options.px, options.rate)
    after = cosines(original, hybrid, held)
    report = {
        "px": options.px, "train": len(train), "heldout": len(heldout), "rate": options.rate, "before": before,
        "after": after,
    }  # fmt: skip
    (options.out / "finetune.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (options.out / "finetune.md").write_text(render(report), encoding="utf-8")
    print(render(report))


def photos_in(folder: Path) -> list[Path]:
    """All photos of a folder, in an order that mixes the folders in it."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    random.Random(0).shuffle(found)  # noqa: S311
    return found


def pixels(paths: Sequence[Path], px: int) -> Tensor:
    """``(B, 3, px, px)``, normalised: the middle of each photo."""
    images = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.resize((px, px), Image.Resampling.BICUBIC, (left, top, left + side, top + side))
        images.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(px, px, 3))
    mean, deviation = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (torch.stack(images).permute(0, 3, 1, 2) / 255 - mean) / deviation


def learn(original: nn.Module, hybrid: nn.Module, paths: Sequence[Path], px: int, rate: float) -> None:
    """One epoch; the rate rises over a tenth of the steps and falls to zero."""
    batches = [paths[i : i + BATCH] for i in range(0, len(paths), BATCH)]
    optimiser = torch.optim.AdamW(hybrid.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=len(batches), pct_start=0.1)
    for number, batch in enumerate(batches):
        images = pixels(batch, px)
        with torch.no_grad():
            wanted = original(images).last_hidden_state
        loss = 1 - F.cosine_similarity(hybrid(images).last_hidden_state, wanted, dim=-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        print(f"step {number + 1} of {len(batches)}: {float(loss.detach()):.4f}", flush=True)


@torch.no_grad()
def cosines(original: nn.Module, hybrid: nn.Module, held: Sequence[Tensor]) -> dict[str, float]:
    """Mean cosine of the last hidden states: of the CLS token, and of the patches."""
    each = torch.cat([F.cosine_similarity(*states(original, hybrid, images), dim=-1) for images in held])
    return {"cls": float(each[:, 0].mean()), "patches": float(each[:, 1:].mean())}


def states(original: nn.Module, hybrid: nn.Module, images: Tensor) -> Iterator[Tensor]:
    """Both last hidden states."""
    return (model(images).last_hidden_state for model in (original, hybrid))


def render(report: dict[str, Any]) -> str:
    """The table as Markdown."""
    before, after = report["before"], report["after"]
    lines = [
        "# Fine-tuning an all-sites LATTE conversion of DINOv2-S",
        "",
        f"Cosine with the original's last hidden state on {report['heldout']} held-out photos at {report['px']} px, "
        f"before and after one epoch on {report['train']} unlabelled others (AdamW, {report['rate']:g}, batches of "
        f"{BATCH}); made by `scripts/finetune.py`.",
        "",
        "| | converted | after one epoch | of the loss recovered |",
        "|---|---|---|---|",
    ]
    for name, title in (("cls", "CLS"), ("patches", "patches")):
        share = (after[name] - before[name]) / (1 - before[name])
        lines.append(f"| {title} | {before[name]:.3f} | {after[name]:.3f} | {share:.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
