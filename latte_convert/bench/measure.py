"""Everything that is measured at one length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from latte_convert import compat
from latte_convert.attention import AttentionCall, SiteCall
from latte_convert.bench import variants as ways
from latte_convert.bench.inputs import Case
from latte_convert.bench.memory import peak_memory
from latte_convert.bench.result import Guard, LengthResult, Operations, VariantName, VariantResult
from latte_convert.bench.timing import Timed, ratio, take_turns, timing
from latte_convert.bench.variants import Variant
from latte_convert.data.feed import Inputs
from latte_convert.errors import CheckpointError, first_line
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.agreement import Agreement
from latte_convert.measuring.flops import measured_flops
from latte_convert.measuring.outputs import named_outputs, primary_output
from latte_convert.progress import Progress

SECONDS = 20.0
"""Time after which no further round of one length begins."""

Calls = Mapping[str, list[AttentionCall]]


@dataclass(frozen=True)
class Settings:
    """How a benchmark is done.

    Attributes:
        device: Where the model is.
        compile: Whether the hybrid's kernels are compiled too.
        rounds: Measurements of each variant.
        progress: Told of every step.
        real: Whether the inputs are real samples: of others a cosine says nothing.
    """

    device: torch.device
    compile: bool
    rounds: int
    progress: Progress
    real: bool


@torch.no_grad()
def measure_case(case: Case, kernels: Mapping[str, Kernel], settings: Settings) -> LengthResult:
    """Measure all variants at one length.

    Args:
        case: The length; the model is left as it was.
        kernels: The kernels of the converted sites.
        settings: How it is done.

    Raises:
        CheckpointError: The model does not run at this length, or its inputs reach no converted site.
    """
    calls = capture(case, kernels)
    reached = {name: kernels[name].to(settings.device).eval() for name in calls}
    advance = settings.progress(f"Measuring {case.label}", 4)
    variants, reasons = _variants(case, reached, calls, settings)
    advance()
    forward = take_turns(
        {name: Timed(partial(case.host.run, case.inputs[0]), v.install) for name, v in variants.items()},
        settings.device,
        rounds=settings.rounds,
        seconds=SECONDS,
    )
    advance()
    alone = take_turns(
        {name: Timed(partial(_attention, v, calls), nullcontext) for name, v in variants.items() if v.kernels},
        settings.device,
        rounds=settings.rounds,
        seconds=SECONDS / 2,
    )
    advance()
    exact = [_primary(case, inputs) for inputs in case.inputs] if settings.real else []
    results = [VariantResult(name=name, reason=reason) for name, reason in reasons.items()]
    for name, variant in variants.items():
        timed: dict[str, Any] = {
            "forward": timing(forward[name]),
            "forward_ratio": ratio(forward[name], forward["original"]),
        }
        if name in alone:
            timed["attention"] = timing(alone[name])
            timed["attention_ratio"] = ratio(alone[name], alone["original"])
        if name != "original" and settings.real:
            timed["cosine"] = _cosine(case, variant, exact)
        results.append(VariantResult(name=name, **timed, **_costs(case, variant, calls, settings.device)))
    advance()
    order = {name: i for i, name in enumerate(_MAKERS)}
    results.sort(key=lambda result: order[result.name])
    return LengthResult(
        label=case.label,
        resolution=case.resolution,
        tokens=tokens_of(calls),
        sites=len(calls),
        variants=results,
    )


def tokens_of(calls: Calls) -> int:
    """The number of tokens that stands for a length: with ``min_tokens`` above it, every site runs its exact branch."""
    return max(call.key.shape[2] for found in calls.values() for call in found)


@torch.no_grad()
def capture(case: Case, kernels: Mapping[str, Kernel]) -> dict[str, list[AttentionCall]]:
    """The attention calls of the converted sites that the first input of a case reaches.

    Raises:
        CheckpointError: It reaches none, or the model does not run on it.
    """
    calls: dict[str, list[AttentionCall]] = {}

    def record(call: SiteCall, name: str) -> None:
        if call.obstacle is not None:
            raise CheckpointError(f"{name}: {call.obstacle}")
        calls.setdefault(name, []).append(call)

    try:
        with case.host.watch({name: partial(record, name=name) for name in kernels}):
            case.host.run(case.inputs[0])
    except (ValueError, RuntimeError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{type(case.host.model).__name__} does not run at {case.label}: {first_line(error)}"
        ) from error
    if not calls:
        raise CheckpointError(
            f"inputs of {case.label} reach no converted site: another tower was converted. Give the other of "
            "--tokens and --resolutions."
        )
    return calls


def _attention(variant: Variant, calls: Calls) -> None:
    for name, found in calls.items():
        for call in found:
            variant.kernels[name](call)


_MAKERS: dict[VariantName, Callable[[Case, Mapping[str, Kernel], Calls, torch.device], Variant]] = {
    "original": lambda case, kernels, calls, device: ways.original(kernels),
    "hybrid": lambda case, kernels, calls, device: ways.hybrid(case, kernels),
    "hybrid_compiled": lambda case, kernels, calls, device: ways.compiled(case, kernels, calls),
    "pooled": lambda case, kernels, calls, device: ways.pooled(case, kernels, calls),
    "merged": lambda case, kernels, calls, device: ways.merged(case, kernels, tokens_of(calls), device),
}


def _variants(
    case: Case, kernels: Mapping[str, Kernel], calls: Calls, settings: Settings
) -> tuple[dict[VariantName, Variant], dict[VariantName, str]]:
    """The variants that run, and why the others do not."""
    variants: dict[VariantName, Variant] = {}
    reasons: dict[VariantName, str] = {}
    for name, make in _MAKERS.items():
        if name == "hybrid_compiled" and not settings.compile:
            continue
        try:
            variant = make(case, kernels, calls, settings.device)
            if variant.kernels:
                _attention(variant, calls)
            with variant.install():
                case.host.run(case.inputs[0])
        except Exception as error:  # compilers and rivals fail in many ways; a row that says so is a result
            if name in ("original", "hybrid"):
                raise
            reasons[name] = first_line(error)
        else:
            variants[name] = variant
    return variants, reasons


def _costs(case: Case, variant: Variant, calls: Calls, device: torch.device) -> dict[str, Any]:
    """Memory and FLOPs of a variant, and its settings."""
    costs: dict[str, Any] = {"detail": variant.detail}
    if variant.name in ("hybrid", "hybrid_compiled"):
        costs["exact_share"] = exact_share(variant.kernels, calls) if variant.kernels else 0.0
        if costs["exact_share"] == 1:
            costs["detail"] = "; ".join(
                filter(None, (variant.detail, "every attention call runs softmax: too few tokens"))
            )
    if variant.kernels and not variant.compiled:
        measured, backend = measured_flops(partial(_attention, variant, calls))
        formula = sum(
            variant.kernels[name].flops(call.shape) * len(call.query) for name, found in calls.items() for call in found
        )
        costs["flops"] = Operations(formula=formula, measured=measured)
        if variant.name == "original":
            costs["detail"] = f"SDPA: {backend}"
    if variant.compiled and device.type != "cuda":
        return {**costs, "reason": "memory inside compiled code is metered on CUDA only"}
    if compat.DISPATCH_MODE.get() is None and device.type != "cuda":
        return {**costs, "reason": compat.DISPATCH_MODE.without}
    with variant.install():
        costs["forward_memory_bytes"] = peak_memory(partial(case.host.run, case.inputs[0]), device)
    if variant.kernels:
        costs["attention_memory_bytes"] = max(
            peak_memory(partial(variant.kernels[name], call), device) for name, found in calls.items() for call in found
        )
    return costs


def exact_share(kernels: Mapping[str, Kernel], calls: Calls) -> float:
    """Share of calls on which a kernel runs softmax, since nothing is cheaper on so few tokens."""
    exact = [kernels[n].is_softmax(kernels[n].inner(call.shape)) for n, found in calls.items() for call in found]
    return sum(exact) / len(exact)


def _cosine(case: Case, variant: Variant, exact: Sequence[Tensor]) -> float:
    """Mean cosine of the primary output with the original's over all inputs of a case."""
    agreement = Agreement()
    with variant.install():
        for inputs, output in zip(case.inputs, exact, strict=True):
            agreement.add(output, _primary(case, inputs))
    return agreement.cosine


def _primary(case: Case, inputs: Inputs) -> Tensor:
    outputs = dict(named_outputs(case.host.run(inputs)))
    return outputs[primary_output(outputs, tower=bool(inputs.tower))]


@torch.no_grad()
def measure_guard(case: Case, tokens: int, kernels: Mapping[str, Kernel], min_tokens: int, settings: Settings) -> Guard:
    """Compare the hybrid with the original at a length below its ``min_tokens``."""
    variants = {"original": ways.original({}), "hybrid": ways.hybrid(case, kernels, min_tokens=min_tokens)}
    identical = True
    for inputs in case.inputs:
        exact = dict(named_outputs(case.host.run(inputs)))
        with variants["hybrid"].install():
            ours = dict(named_outputs(case.host.run(inputs)))
        identical = identical and all(torch.equal(exact[name], ours[name]) for name in exact)
    times = take_turns(
        {name: Timed(partial(case.host.run, case.inputs[0]), v.install) for name, v in variants.items()},
        settings.device,
        rounds=2 * settings.rounds,
        seconds=SECONDS / 2,
    )
    return Guard(tokens=tokens, forward_ratio=ratio(times["hybrid"], times["original"]), identical=identical)
