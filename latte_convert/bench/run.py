"""A benchmark, top to bottom: open, make inputs of each length, measure, find the crossover, check below it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from latte_convert.adapters.merging import is_block_of
from latte_convert.artifact.check import artifact_directory, manifest_of_library
from latte_convert.artifact.load import Artifact, open_artifact
from latte_convert.bench.crossover import find_crossover, paces, statements
from latte_convert.bench.inputs import Case, make_cases
from latte_convert.bench.measure import Settings, measure_case, measure_guard
from latte_convert.bench.result import BenchReport, LengthResult
from latte_convert.environment import choose_device, library_versions, tool_version
from latte_convert.errors import CheckpointError, UsageError
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.progress import Progress, progress_of

ROUNDS = 10


def bench(
    directory: str | Path,
    *,
    tokens: Sequence[int] = (),
    resolutions: Sequence[int] = (),
    data: str | None = None,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    compile: bool = True,
    rounds: int = ROUNDS,
    trust_remote_code: bool = False,
    progress: Progress | bool = True,
) -> BenchReport:
    """Measure what an artifact costs beside its original, over sequence lengths.

    Args:
        directory: An artifact; it is only read.
        tokens: Lengths of texts.
        resolutions: Heights and widths of images in pixels. Where no length is given, four of the model's kind are
            chosen; models of audio have one.
        data: Real samples, for cosines too; where None, what is timed are synthetic ones.
        device: ``auto``, ``cpu``, ``cuda``, ….
        dtype: Of the weights, instead of the checkpoint's own. Flash attention on GPUs wants half precision.
        compile: Measure the hybrid with compiled kernels too.
        rounds: Measurements of each variant, fewer where they take long.
        trust_remote_code: Run Python code that came with the source checkpoint.
        progress: True shows bars; False shows nothing; a function is told of every length.

    Raises:
        IntegrityError: ``directory`` is not a whole artifact.
        CheckpointError: There is no such directory, or the model does not run at a length.
        DataError: The model does not take as many tokens, or ``data`` has no usable sample.
        UsageError: The lengths are of another kind than the model's, or there is no such device.
    """
    start = time.perf_counter()
    if rounds < 1:
        raise UsageError(f"rounds must be 1 or more, not {rounds}.")
    manifest_of_library(artifact_directory(directory), "time it on inputs of yours, beside the original")
    artifact = open_artifact(directory, device=choose_device(device), trust_remote_code=trust_remote_code)
    kernels = artifact.kernels or _exact(artifact)
    if not kernels:
        raise CheckpointError(f"{directory} has no converted site: there is nothing to compare.")
    artifact.model.to(dtype=dtype)
    parameter = next(artifact.model.parameters())
    modality, cases = make_cases(artifact, tokens, resolutions, data)
    settings = Settings(parameter.device, compile, rounds, progress_of(progress), real=data is not None)
    lengths = _measured(cases, kernels, settings)
    crossover = find_crossover(paces(lengths, "hybrid"))
    guard = [
        measure_guard(case, length.tokens, kernels, crossover.tokens, settings)
        for case, length in zip(cases, lengths, strict=False)  # of an interrupted run fewer
        if crossover.tokens is not None and length.tokens < crossover.tokens
    ]
    compiled = paces(lengths, "hybrid_compiled")
    return BenchReport(
        tool_version=tool_version(),
        library_versions=library_versions(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        artifact=artifact.path.resolve().name,
        artifact_fingerprint=artifact.manifest.fingerprint,
        source=artifact.manifest.source.id,
        modality=modality,
        data=data,
        device=str(parameter.device),
        threads=torch.get_num_threads(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        lengths=lengths,
        crossover=crossover,
        crossover_compiled=find_crossover(compiled) if compiled else None,
        crossover_attention=find_crossover(paces(lengths, "hybrid", attention=True)),
        guard=guard,
        statements=statements(lengths, crossover, guard) + _unfinished(cases, lengths),
        min_tokens_written=None,
        seconds=time.perf_counter() - start,
    )


def _measured(cases: Sequence[Case], kernels: Mapping[str, Kernel], settings: Settings) -> list[LengthResult]:
    """The lengths, as many as are finished where Ctrl-C interrupts a later one.

    Raises:
        KeyboardInterrupt: None is finished.
    """
    lengths: list[LengthResult] = []
    try:
        lengths.extend(measure_case(case, kernels, settings) for case in cases)
    except KeyboardInterrupt:
        if not lengths:
            raise
    return lengths


def _unfinished(cases: Sequence[Case], lengths: Sequence[LengthResult]) -> list[str]:
    left = [case.label for case in cases[len(lengths) :]]
    return [f"interrupted: not measured at {', '.join(left)}"] if left else []


def _exact(artifact: Artifact) -> dict[str, Kernel]:
    """Exact attention for the sites of blocks whose tokens are merged: what an artifact without kernels runs."""
    sites = artifact.host.sites()
    return {s.name: ExactKernel(s.heads, s.head_dim) for s in sites if is_block_of(artifact.merges, s.name)}
