"""``latte bench``: what a hybrid costs beside its original."""

from __future__ import annotations

import logging
import math
import shlex
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from latte_convert.cli import console, interrupts, options
from latte_convert.wording import rounded_down

if TYPE_CHECKING:
    from latte_convert.bench.result import BenchReport, LengthResult, Timing, VariantResult


class Dtype(str, Enum):
    """What weights can be cast to."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


_LENGTHS = "Lengths"
_NAMES = {
    "original": "original",
    "hybrid": "hybrid",
    "hybrid_compiled": "hybrid, compiled",
    "pooled": "pooled keys (rival)",
    "merged": "merged tokens (rival)",
}


def bench(
    directory: options.Directory,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N,N,…", rich_help_panel=_LENGTHS, help="Lengths of texts, in tokens."),
    ] = None,
    resolutions: Annotated[
        str | None,
        typer.Option("--resolutions", metavar="PX,PX,…", rich_help_panel=_LENGTHS, help="Sizes of images, in pixels."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Real samples, to compare outputs on; without them synthetic ones are timed.",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", rich_help_panel=options.MODEL, help="Cast the weights, as saved if not given."),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure the hybrid with compiled kernels too.")
    ] = True,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measurements of each variant.")] = 10,
    write: Annotated[
        bool,
        typer.Option(
            "--write", rich_help_panel=options.OUTPUT, help="Store the crossover as min_tokens in the artifact."
        ),
    ] = False,
    save: Annotated[
        bool,
        typer.Option("--save", rich_help_panel=options.OUTPUT, help="Keep the figures as bench.json in the artifact."),
    ] = False,
    trust_remote_code: options.Remote = False,
    json: options.Json = False,
) -> None:
    """Measure time, memory and FLOPs against exact attention over lengths, and find the crossover.

    Example: latte bench hybrid/ --resolutions 224,392,518 --write
    """
    lengths = {"tokens": _numbers("--tokens", tokens), "resolutions": _numbers("--resolutions", resolutions)}

    import torch

    from latte_convert.bench.run import bench as run
    from latte_convert.bench.store import save_report, write_min_tokens

    # What PyTorch's compiler says of a CUDA that is not there is not news here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with console.log_to_stderr(), console.progress() as progress:
        report = run(
            directory,
            **lengths,
            data=data,
            device=device,
            dtype=getattr(torch, dtype.value) if dtype else None,
            compile=compile,
            rounds=rounds,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    _show(report)
    if write and report.crossover.tokens is not None:
        write_min_tokens(directory, report.crossover.tokens, trust_remote_code=trust_remote_code)
        report = report.model_copy(update={"min_tokens_written": report.crossover.tokens})
        console.note(f"min_tokens = {report.crossover.tokens} is stored in {directory}")
    elif write:
        console.note(
            "nothing was stored: no length is known from which on the hybrid is faster. Measure three or more, and "
            "longer ones."
        )
    elif report.crossover.tokens is not None:
        console.note(f"--write stores min_tokens = {report.crossover.tokens}: shorter inputs then run exact attention.")
    if save:
        console.note(f"saved: {save_report(directory, report)}")
        console.note(f"next: latte report {shlex.quote(str(directory))}")
    if json:
        console.document(report.model_dump(mode="json"))
    else:
        for line in report.statements:
            console.result(line)
    interrupts.heed()


def _numbers(option: str, text: str | None) -> list[int]:
    """Numbers separated by commas.

    Raises:
        UsageError: They are something else.
    """
    from latte_convert.errors import UsageError

    if text is None:
        return []
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} takes positive numbers separated by commas, such as 128,256, not '{text}'.")
    return numbers


def _show(report: BenchReport) -> None:
    rows = [_row(length, variant) for length in report.lengths for variant in length.variants]
    console.table(
        f"{report.source} on {report.device}, {report.dtype}, {report.threads} threads, batch size 1: "
        "median (quartiles); x is time over the original's",
        (
            "length",
            "tokens",
            "variant",
            "attention ms",
            "x",
            "forward ms",
            "x",
            "peak MB",
            "attention MB",
            "FLOPs",
            "counted",
            "cosine",
        ),
        rows,
        right=(1, 3, 4, 5, 6, 7, 8, 9, 10, 11),
    )
    for text, labels in _remarks(report).items():
        console.note(f"{text} [{', '.join(labels)}]")
    if report.modality == "audio":
        console.note("models of audio have one length: that of their feature extractor's window.")
    if report.data is None:
        console.note("inputs are synthetic; give --data for cosines on your samples.")


def _remarks(report: BenchReport) -> dict[str, list[str]]:
    """What is to be said of variants, and at which lengths."""
    remarks: dict[str, list[str]] = {}
    for length in report.lengths:
        for variant in length.variants:
            if text := "; ".join(filter(None, (variant.detail, variant.reason))):
                remarks.setdefault(f"{_NAMES[variant.name]}: {text}", []).append(length.label)
    return remarks


def _row(length: LengthResult, variant: VariantResult) -> tuple[str, ...]:
    flops = variant.flops
    return (
        length.label,
        str(length.tokens),
        _NAMES[variant.name],
        _milliseconds(variant.attention),
        _ratio(variant.attention_ratio),
        _milliseconds(variant.forward),
        _ratio(variant.forward_ratio),
        _megabytes(variant.forward_memory_bytes),
        _megabytes(variant.attention_memory_bytes),
        f"{flops.formula / 1e9:.3g} G" if flops else "-",
        f"{flops.measured / flops.formula:.3f}" if flops else "-",
        rounded_down(variant.cosine) if variant.cosine is not None else "-",
    )


def _milliseconds(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(max(timing.median_ms, 1e-3))))
    shown = [f"{value:.{digits}f}" for value in (timing.median_ms, timing.lower_ms, timing.upper_ms)]
    return f"{shown[0]} ({shown[1]}-{shown[2]})"


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _megabytes(count: int | None) -> str:
    return f"{count / 1e6:.3g}" if count is not None else "-"
