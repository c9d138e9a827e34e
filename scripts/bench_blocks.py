"""Processor time of blocks and near_far against exact attention, on one thread.

All take turns in one process. Processor time, and the least of all turns, so that other programs of the machine matter
little. Grids are square, with one prefix token: 37 is N = 1370. Usage::

    python scripts/bench_blocks.py --sides 37 74 111 148
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.kernels.blocks.kernel import BlocksKernel
from latte_convert.kernels.near_far.kernel import NearFarKernel


def processor_ms(call: Callable[[], object]) -> float:
    """Processor time of one call on this thread."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def time_at(side: int, heads: int, head_dim: int, repeats: int) -> dict[str, float]:
    """Least milliseconds of every kernel with its default options."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, 1 + side**2, heads, head_dim).transpose(1, 2) for _ in range(3)]
    call = AttentionCall(*qkv, scale=head_dim**-0.5, layout=TokenLayout(prefix=1, grid=(side, side)))
    calls: dict[str, Callable[[], object]] = {
        "exact": partial(F.scaled_dot_product_attention, *qkv, scale=call.scale),
        "near_far": partial(NearFarKernel(heads, head_dim), call),
        "blocks": partial(BlocksKernel(heads, head_dim), call),
        "blocks, none opened": partial(BlocksKernel(heads, head_dim, opened=0), call),
    }
    turns = [{name: processor_ms(each) for name, each in calls.items()} for _ in range(repeats + 1)]
    return {name: min(turn[name] for turn in turns[1:]) for name in calls}


@torch.inference_mode()
def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[37, 74, 111, 148])
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| tokens | exact, ms | near_far | blocks | blocks, none opened |\n|---|---|---|---|---|")
    for side in args.sides:
        exact, *others = time_at(side, args.heads, args.head_dim, args.repeats).values()
        cells = (f"{ms:.0f} ({exact / ms:.2f}x)" for ms in others)
        print(f"| {1 + side**2} | {exact:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
