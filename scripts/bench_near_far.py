"""Time near_far against exact attention on this machine's CPU, and measure its memory.

Exact attention and near_far take turns in one process; the ratio is that of the medians. Grids are square, with one
prefix token: 37 is N = 1370. Peak memory is what one call adds to the resident set of a fresh process (Linux only), in
bytes and in sizes of query, key, value and output together. Usage::

    python scripts/bench_near_far.py --sides 37 64 91 --json near_far.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_kernel import milliseconds, resident
from torch import Tensor
from torch.nn import functional as F

from latte_convert.attention import AttentionCall, CallShape, TokenLayout
from latte_convert.kernels.near_far.kernel import NearFarKernel
from latte_convert.kernels.softmax import softmax_flops

OPTIONS = ("window", "halo", "clusters", "steps", "views")
Row = dict[str, Any]


def inputs(args: argparse.Namespace, side: int) -> list[Tensor]:
    """Query, key and value of unit variance, ``(1, H, 1 + side², d)``, views as projections give them."""
    torch.manual_seed(0)
    shape = (1, 1 + side**2, args.heads, args.head_dim)
    return [torch.randn(shape).transpose(1, 2) for _ in range(3)]


def build(args: argparse.Namespace) -> NearFarKernel:
    """The kernel with the options of the command line."""
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    return NearFarKernel(args.heads, args.head_dim, **given)


def time_at(args: argparse.Namespace, side: int) -> Row:
    """Median and quartiles of both, their ratio, and the ratio of the FLOPs."""
    kernel, qkv, scale = build(args), inputs(args, side), args.head_dim**-0.5
    layout = TokenLayout(prefix=1, grid=(side, side))
    calls = {
        "exact": partial(F.scaled_dot_product_attention, *qkv, scale=scale),
        "near_far": partial(kernel, AttentionCall(*qkv, scale=scale, layout=layout)),
    }
    times = milliseconds(calls, args.repeats, 1)
    tokens = 1 + side**2
    shape = CallShape(tokens, tokens, args.heads, args.head_dim, args.head_dim, layout=layout)
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    return {
        "tokens": tokens,
        "ms": {name: {"low": low, "median": mid, "high": high} for name, (low, mid, high) in quartiles.items()},
        "speedup": quartiles["exact"][1] / quartiles["near_far"][1],
        "flops_ratio": softmax_flops(shape) / kernel.flops(shape),
        "peak": peak_memory(args, side),
    }


def probe(args: argparse.Namespace, side: int) -> int:
    """Bytes that one call adds to the resident set at its peak; meant for a process of its own."""
    kernel, layout = build(args), TokenLayout(prefix=1, grid=(side, side))
    call = AttentionCall(*inputs(args, side), scale=args.head_dim**-0.5, layout=layout)
    kernel(call)
    ctypes.CDLL(None).malloc_trim(0)  # hand the warm-up's memory back
    Path("/proc/self/clear_refs").write_text("5")  # restart the high-water mark
    before = resident("VmRSS")
    out = kernel(call)
    peak = resident("VmHWM") - before  # read before the check below makes tensors of its own
    return peak if out.isfinite().all() else -1


def peak_memory(args: argparse.Namespace, side: int) -> Row | None:
    """``probe`` in a fresh process; None where the system does not offer it."""
    if platform.system() != "Linux" or args.no_memory:
        return None
    names = ("heads", "head_dim", "threads", *OPTIONS)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    options = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, __file__, "--probe", *options, "--sides", str(side)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = int(done.stdout.strip().splitlines()[-1])
    return {"bytes": size, "of_inputs_and_output": size / (4 * 4 * (1 + side**2) * args.heads * args.head_dim)}


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| tokens | exact, ms | near_far, ms | speed-up | FLOPs ratio | peak MiB | of q, k, v and out |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        exact, own = (f"{row['ms'][name]['median']:.1f}" for name in ("exact", "near_far"))
        peak = row["peak"]
        memory = f"{peak['bytes'] / 2**20:.0f} | {peak['of_inputs_and_output']:.1f}" if peak else "- | -"
        lines.append(
            f"| {row['tokens']} | {exact} | {own} | {row['speedup']:.1f}x | {row['flops_ratio']:.1f}x | {memory} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[37, 64, 91, 128])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    for name in OPTIONS:
        parser.add_argument(f"--{name}", type=int, help="option of near_far; its default where left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="leave the memory probes out")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    args = parse()
    torch.set_num_threads(args.threads)
    if args.probe:
        print(probe(args, args.sides[0]))
        return
    rows = [time_at(args, side) for side in args.sides]
    result = {
        "torch": torch.__version__,
        "threads": args.threads,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "repeats": args.repeats,
        "options": build(args).options,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
