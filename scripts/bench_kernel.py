"""Time the latte kernel against exact attention on this machine's CPU.

Exact attention, latte eager and latte compiled take turns in one process, in blocks of ``--block`` calls (1: call by
call, so that each finds what the others left in caches and allocator), in both layouts that occur: contiguous
``(B, H, N, d)`` and the transposed view of a ``(B, N, H, d)`` projection. Peak memory is what one
call adds to the resident set of a fresh process (Linux only). Usage::

    python scripts/bench_kernel.py --tokens 256 1369 4096 8192 --json kernel.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.attention import AttentionCall
from latte_convert.kernels.latte.kernel import LatteKernel

LAYOUTS = ("contiguous", "transposed")
VARIANTS = ("exact", "eager", "compiled")
CROSSOVER = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
WARM_UP = 3
Row = dict[str, Any]


def inputs(args: argparse.Namespace, tokens: int, layout: str) -> list[Tensor]:
    """Query, key and value of unit variance, ``(B, H, N, d)``."""
    torch.manual_seed(0)
    if layout == "contiguous":
        return [torch.randn(args.batch, args.heads, tokens, args.head_dim) for _ in range(3)]
    return [torch.randn(args.batch, tokens, args.heads, args.head_dim).transpose(1, 2) for _ in range(3)]


def variant(name: str, args: argparse.Namespace) -> Callable[..., Tensor]:
    """What is timed, as a function of query, key and value."""
    scale = args.head_dim**-0.5
    if name == "exact":
        return lambda *qkv: F.scaled_dot_product_attention(*qkv, scale=scale)
    kernel = LatteKernel(args.heads, args.head_dim)
    attend = torch.compile(kernel, dynamic=False) if name == "compiled" else kernel
    return lambda *qkv: attend(AttentionCall(*qkv, scale=scale))


def milliseconds(calls: dict[str, Callable[[], object]], repeats: int, block: int) -> dict[str, list[float]]:
    """Times of the calls after a warm-up of each; they take turns in blocks, each led in by an untimed call."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(1, repeats // block)):
        for name, call in calls.items():
            if block > 1:
                call()
            for _ in range(block):
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def time_at(args: argparse.Namespace, tokens: int, layout: str, variants: tuple[str, ...]) -> Row:
    """Median and quartiles of every variant at one length, and the speed-up of the medians over exact."""
    # All compiled code counts against one recompilation limit; past it dynamo would quietly run eager.
    torch._dynamo.reset()
    qkv = inputs(args, tokens, layout)
    times = milliseconds({name: partial(variant(name, args), *qkv) for name in variants}, args.repeats, args.block)
    entries: dict[str, dict[str, float]] = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        speedup = statistics.median(times["exact"]) / median
        entries[name] = {"median": median, "low": low, "high": high, "min": min(values), "speedup": speedup}
    return {"tokens": tokens, "layout": layout, "ms": entries}


def crossover(args: argparse.Namespace, layout: str) -> int | None:
    """Smallest scanned length from which eager latte stays faster than exact; None if there is none."""
    faster_from = None
    for tokens in CROSSOVER:
        row = time_at(args, tokens, layout, ("exact", "eager"))
        faster_from = (faster_from or tokens) if row["ms"]["eager"]["speedup"] > 1 else None
    return faster_from


def resident(field: str) -> int:
    """``VmRSS`` or its high-water mark ``VmHWM`` in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def probe(args: argparse.Namespace, name: str, tokens: int) -> int:
    """Bytes that one call adds to the resident set at its peak; meant for a process of its own."""
    qkv = inputs(args, tokens, "transposed")
    attend = variant(name, args)
    attend(*qkv)
    ctypes.CDLL(None).malloc_trim(0)  # hand the warm-up's memory back
    Path("/proc/self/clear_refs").write_text("5")  # restart the high-water mark
    before = resident("VmRSS")
    out = attend(*qkv)
    return resident("VmHWM") - before if out.isfinite().all() else -1


def peak_memory(argv: list[str], name: str, tokens: int) -> int | None:
    """``probe`` in a fresh process; None where the system does not offer it."""
    if platform.system() != "Linux":
        return None
    command = [sys.executable, __file__, *argv, "--probe", name, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def markdown(result: Row, variants: tuple[str, ...]) -> str:
    """The result as a table."""
    lines = [
        "| tokens | layout | " + " | ".join(variants) + " | peak MiB |",
        "|---" * (len(variants) + 3) + "|",
    ]
    for row in result["rows"]:
        cells = ["{median:.2f} [{low:.2f}, {high:.2f}], {speedup:.1f}x".format(**row["ms"][name]) for name in variants]
        memory = result["peak_bytes"].get(str(row["tokens"]), {})
        peaks = " / ".join("-" if memory.get(v) is None else f"{memory[v] / 2**20:.0f}" for v in variants)
        lines.append(f"| {row['tokens']} | {row['layout']} | {' | '.join(cells)} | {peaks} |")
    lines.append("\nMedian [quartiles] in ms, speed-up of the medians over exact; peak memory in the same order.")
    for layout, tokens in result["crossover"].items():
        where = f"below {tokens} tokens" if tokens else f"up to {CROSSOVER[-1]} tokens"
        lines.append(f"{layout}: eager latte is slower than exact {where} (scanned from {CROSSOVER[0]} up)")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1369, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--block", type=int, default=5, help="calls of one variant before the next has its turn")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled variant out")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory probes out")
    parser.add_argument("--no-crossover", action="store_true", help="leave the scan of short lengths out")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--probe", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str]) -> None:
    """Measure, print, write."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.probe:
        print(probe(args, args.probe, args.tokens[0]))
        return
    variants = VARIANTS[:2] if args.no_compile else VARIANTS
    shape = ["--batch", str(args.batch), "--heads", str(args.heads), "--head-dim", str(args.head_dim)]
    shape += ["--threads", str(args.threads)]
    result: Row = {
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": args.threads,
        "dtype": "float32",
        "batch": args.batch,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "repeats": args.repeats,
        "block": args.block,
        "rows": [time_at(args, tokens, layout, variants) for tokens in args.tokens for layout in LAYOUTS],
        "crossover": {} if args.no_crossover else {layout: crossover(args, layout) for layout in LAYOUTS},
        "peak_bytes": {}
        if args.no_memory
        else {str(n): {v: peak_memory(shape, v, n) for v in variants} for n in args.tokens},
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(markdown(result, variants))


if __name__ == "__main__":
    main(sys.argv[1:])
