"""What the Triton kernels are worth on this machine's GPU: whether they are right, and how fast.

Parity with float64 PyTorch; then milliseconds of ``latte`` and ``near_far``, in Triton and in PyTorch, beside
FlashAttention (``F.scaled_dot_product_attention``) at 1,025 to 65,537 tokens; then a DINOv2 ViT-S/14 end to end, with
one kernel on all 12 sites beside the original. It ends by itself within 8 minutes and writes down what it got to::

    python scripts/device_check.py

Without a card it says so and exits with code 3. ``--interpret`` checks parity alone, at small sizes on a CPU, in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.environment import library_versions
from latte_convert.kernels import Kernel, device, get_kernel

HERE = Path(__file__).parent
MODEL = Path("~/.cache/latte_convert/models/dinov2-small-saliency").expanduser()
SECONDS = 450
"""No measurement begins later, and one that is still running is broken off."""
HEADS, HEAD_DIM = 6, 64
CLUSTERS = (128, 256)
GRIDS = (32, 45, 64, 91, 128, 181, 256)
"""Side of the grid of tokens behind the prefix."""
BATCH = 1 << 16
"""Tokens of a batch, about, where it has more than one sample."""
PIXELS = (518, 1036, 2072)
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest norm of the error over that of the output."""
Row = dict[str, Any]


def kernels(
    place: torch.device, width: int = HEAD_DIM, counts: tuple[int, ...] = CLUSTERS, **options: int
) -> dict[str, Kernel]:
    """The kernels, by the names of their rows."""
    made = {"latte": get_kernel("latte")(HEADS, width, sigma=True)}
    for clusters in counts:
        made[f"near_far, {clusters} clusters"] = get_kernel("near_far")(HEADS, width, clusters=clusters, **options)
    return {name: kernel.requires_grad_(False).to(place) for name, kernel in made.items()}


def inputs(batch: int, tokens: int, width: int, dtype: torch.dtype, place: torch.device) -> list[Tensor]:
    """Query, key and value as views of ``(B, N, H, d)`` projections; queries have a mean, as in real models."""
    query, key, value = (torch.randn(batch, tokens, HEADS, width, device=place).transpose(1, 2) for _ in range(3))
    return [x.to(dtype) for x in (query + 1, key, value)]


# --- parity ---


def parity(
    place: torch.device, grid: tuple[int, int], options: dict[str, Any], in_time: Callable[[], bool]
) -> Iterator[Row]:
    """Errors of the Triton kernels, relative to the output: odd sizes, a prefix, with a mask and without, causal."""
    tokens = 1 + grid[0] * grid[1]
    for dtype, (width, masked) in product(MOST_ERROR, ((HEAD_DIM, False), (80, True))):
        qkv = inputs(2, tokens, width, dtype, place)
        mask = torch.rand(2, tokens, device=place) > 0.3 if masked else None
        settings = {"scale": width**-0.5, "mask": mask, "layout": TokenLayout(1, grid)}
        for (name, kernel), causal in product(kernels(place, width, **options).items(), (False, True)):
            if causal and not kernel.causal_form:
                continue
            call = AttentionCall(*qkv, causal=causal, **settings)
            row: Row = {"kernel": name, "dtype": str(dtype), "head_dim": width, "masked": masked, "causal": causal}
            row["triton"] = device.runs_in_triton(call) and not kernel.is_softmax(call.shape)
            if not in_time():
                yield row | {"right": False, "reason": "no time was left"}
                continue
            try:
                found = kernel(call).double()
                exact = kernel(AttentionCall(*(x.double() for x in qkv), causal=causal, **settings))
            except Exception as error:  # a row that says what failed is a result
                yield row | {"right": False, "reason": _reason(error)}
                continue
            error = float((found - exact).norm() / exact.norm())
            yield row | {"error": error, "right": error <= MOST_ERROR[dtype]}


def passed(rows: list[Row]) -> bool:
    """Whether Triton served all, and right."""
    return bool(rows) and all(row["right"] and row["triton"] for row in rows)


# --- speed ---


def milliseconds(call: Callable[[], object], context: AbstractContextManager[Any] | None = None) -> float | str:
    """Median time of a call on the card, after a warm-up that compiles; or why there is none."""
    times: list[float] = []
    try:
        with context or nullcontext():
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            started = time.perf_counter()
            while len(times) < 5 or (len(times) < 30 and time.perf_counter() - started < 0.5):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
    except Exception as error:  # a row that says why it is empty is a result
        torch.cuda.empty_cache()
        return _reason(error)
    return statistics.median(times)


@contextmanager
def in_pytorch() -> Iterator[None]:
    """Without Triton: it serves no dtype."""
    served, device.DTYPES = device.DTYPES, ()
    try:
        yield
    finally:
        device.DTYPES = served


def attention(place: torch.device, in_time: Callable[[], bool]) -> Iterator[Row]:
    """Milliseconds of each way at each length."""
    for dtype, side in product((torch.bfloat16, torch.float16), GRIDS):
        tokens = 1 + side**2
        batch = max(1, BATCH // tokens)
        qkv = inputs(batch, tokens, HEAD_DIM, dtype, place)
        call = AttentionCall(*qkv, HEAD_DIM**-0.5, layout=TokenLayout(1, (side, side)))
        row: Row = {"dtype": str(dtype), "tokens": tokens, "batch": batch}
        ways: list[tuple[str, Callable[[], object], Callable[[], AbstractContextManager[Any]]]] = [
            ("FlashAttention", partial(F.scaled_dot_product_attention, *qkv), flash),
            ("FlashAttention, causal", partial(F.scaled_dot_product_attention, *qkv, is_causal=True), flash),
        ]
        made = kernels(place)
        causal = partial(made["latte"], AttentionCall(*qkv, HEAD_DIM**-0.5, causal=True))
        for name, way in {
            **{name: partial(kernel, call) for name, kernel in made.items()},
            "latte, causal": causal,
        }.items():
            ways += [(name, way, nullcontext), (f"{name}, PyTorch", way, in_pytorch)]
        yield row | {"milliseconds": {name: milliseconds(way, context()) for name, way, context in ways if in_time()}}


def flash() -> AbstractContextManager[Any]:
    """FlashAttention or an error."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def end_to_end(model: nn.Module, place: torch.device, in_time: Callable[[], bool]) -> Iterator[Row]:
    """Milliseconds and peak memory of the whole model, for one image."""
    host = Host.of(model)
    sites = [site.name for site in host.sites()]
    for side in PIXELS:
        pixels = torch.randn(1, 3, side, side, device=place, dtype=torch.bfloat16)
        run = partial(model, pixel_values=pixels)
        exact = run().last_hidden_state.float()
        for name in ("original", *kernels(place)):
            if not in_time():
                return
            changes = {} if name == "original" else {site: kernels(place)[name] for site in sites}
            row: Row = {"px": side, "tokens": exact.shape[1], "kernel": name}
            with host.convert(changes):
                row["milliseconds"] = milliseconds(run)
                torch.cuda.reset_peak_memory_stats()
                found = run().last_hidden_state.float()
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
            yield row | {"cosine": float(F.cosine_similarity(found, exact, dim=-1).mean())}


def dinov2(path: Path) -> tuple[nn.Module, str]:
    """The model at a path, or one like it with random weights; and which it is."""
    if path.exists():
        return transformers.AutoModel.from_pretrained(path), path.name
    config = transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, patch_size=14, image_size=518)
    return transformers.Dinov2Model(config), "a ViT-S/14 with random weights"


# --- the command ---


@torch.inference_mode()
def main() -> int:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="check parity on a CPU, in Triton's interpreter")
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="a DINOv2 ViT-S/14; where it is absent, one with random weights"
    )
    parser.add_argument(
        "--json", type=Path, default=HERE / "results" / "device.json", help="what a card measured goes here"
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)

    def in_time() -> bool:
        return time.perf_counter() - started < SECONDS

    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        small = {"window": 2, "halo": 1, "counts": (9, 16)}
        return int(not passed(printed(parity(torch.device("cpu"), (7, 9), small, lambda: True), [])))
    if not torch.cuda.is_available():
        print("PyTorch finds no CUDA device here: run this where there is one, or with --interpret", file=sys.stderr)
        return 3
    signal.signal(signal.SIGALRM, _break_off)
    signal.alarm(SECONDS)
    place = torch.device("cuda", torch.cuda.current_device())
    report: Row = {"device": torch.cuda.get_device_name(place), "versions": library_versions()}
    try:
        printed(parity(place, (61, 67), {}, in_time), report.setdefault("parity", []))
        printed(attention(place, in_time), report.setdefault("attention", []))
        model, report["model"] = dinov2(arguments.model)
        model = model.to(place, torch.bfloat16).eval()
        printed(end_to_end(model, place, in_time), report.setdefault("end_to_end", []))
    except TimeoutError as error:
        report["broken_off"] = str(error)
    report["seconds"] = time.perf_counter() - started
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not passed(report.get("parity", [])))


def printed(rows: Iterator[Row], found: list[Row]) -> list[Row]:
    """``found`` with all rows, each printed as it comes."""
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _break_off(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"{SECONDS} seconds are over")


if __name__ == "__main__":
    sys.exit(main())
