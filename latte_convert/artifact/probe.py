"""The probe: a seeded random input of a real sample's shape, and the hybrid's answer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latte_convert.artifact.manifest import ProbeRecord
from latte_convert.data.feed import anchor
from latte_convert.errors import IntegrityError, first_line
from latte_convert.measuring.outputs import named_outputs, primary_output

if TYPE_CHECKING:
    from latte_convert.data.feed import Feed

SEED = 20261130
VALUES = 64


_FAILURES = (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError)
"""What a model raises on inputs that it does not take."""


def record_probe(model: nn.Module, feed: Feed) -> ProbeRecord | None:
    """Run the hybrid on a seeded random input of the shape of the first sample of ``feed``.

    No sample is stored: floats are normal noise, integers are drawn from the sample's range, masks are ones. Where a
    model does not run on that, integers that stand for structure (image tokens, sizes, positions) are kept.

    Returns:
        None where it runs on neither.
    """
    sample = next(iter(feed))
    kept = _token_ids(getattr(model, "config", None))
    drawn = {key: _describe(key, value) for key, value in sample.kwargs.items()}
    structured = {key: _structure(key, value, kept) for key, value in sample.kwargs.items()}
    return _first_answered(model, sample.method, [drawn, structured], SEED)


def renewed_probe(model: nn.Module, probe: ProbeRecord) -> ProbeRecord | None:
    """The same question with the answer that a model has to it now, in its precision of now where it takes no other."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    floats = {key for key, spec in probe.inputs.items() if "dtype" in spec and "range" not in spec}
    cast = {key: {**spec, "dtype": dtype} if key in floats else spec for key, spec in probe.inputs.items()}
    return _first_answered(model, probe.method, [probe.inputs, cast], probe.seed, probe.output)


def _first_answered(
    model: nn.Module, method: Any, questions: list[dict[str, dict[str, Any]]], seed: int, wanted: str | None = None
) -> ProbeRecord | None:
    for inputs in questions:
        try:
            name, output = answer(model, method, inputs, seed, wanted)
        except _FAILURES:
            continue
        return ProbeRecord(seed=seed, inputs=inputs, method=method, output=name, values=sample_values(output))
    return None


def probe_difference(model: nn.Module, probe: ProbeRecord) -> float:
    """Largest difference of the model's answer from the recorded one, relative to the output's scale.

    Raises:
        IntegrityError: The model's answer has another form.
    """
    try:
        _, output = answer(model, probe.method, probe.inputs, probe.seed, probe.output)
    except _FAILURES as error:
        raise IntegrityError(f"the recorded probe does not run: {first_line(error)}") from None
    values = torch.tensor(sample_values(output))
    recorded = torch.tensor(probe.values)
    if values.shape != recorded.shape:
        raise IntegrityError(f"the model's '{probe.output}' has {len(values)} probe values, {len(recorded)} recorded")
    return float((values - recorded).abs().max() / output.float().square().mean().sqrt().clamp_min(1e-12))


@torch.no_grad()
def answer(
    model: nn.Module, method: str, inputs: dict[str, dict[str, Any]], seed: int, wanted: str | None = None
) -> tuple[str, Tensor]:
    """What a model puts out for seeded random inputs: the name of the output, and the output on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    device = anchor(model).device
    batch = {key: _draw(spec, generator, device) for key, spec in inputs.items()}
    outputs = dict(named_outputs(getattr(model, method)(**batch)))
    name = wanted or primary_output(outputs, tower=method != "forward")
    if name not in outputs:
        raise IntegrityError(f"the model has no output '{name}' any more; it has {', '.join(outputs)}")
    return name, outputs[name].cpu()


def _describe(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"value": value}
    spec: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if not value.is_floating_point():
        low, high = int(value.min()), int(value.max())
        spec["range"] = [1, 1] if "mask" in key else [low, high]
    return spec


def _structure(key: str, value: Any, special: frozenset[int]) -> dict[str, Any]:
    """Like ``_describe``, but token ids that the model's configuration names stay in place, and other integers too."""
    spec = _describe(key, value)
    if "range" not in spec or "mask" in key:
        return spec
    flat = value.flatten().tolist()
    if "ids" not in key.split("_"):
        return {**spec, "kept": dict(enumerate(flat))}
    words = [token for token in flat if token not in special]
    low, high = (min(words), max(words)) if words else spec["range"]
    return {**spec, "range": [low, high], "kept": {i: token for i, token in enumerate(flat) if token in special}}


def _token_ids(config: Any) -> frozenset[int]:
    """The ids that a Transformers configuration gives a meaning, such as the token that stands for a patch."""
    found: set[int] = set()

    def collect(node: Any) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                collect(value)
            elif "token" in str(key) and not isinstance(value, bool):
                found.update(v for v in (value if isinstance(value, list) else [value]) if type(v) is int)

    if hasattr(config, "to_dict"):
        collect(config.to_dict())
    return frozenset(found)


def _draw(spec: dict[str, Any], generator: torch.Generator, device: torch.device) -> Any:
    if "value" in spec:
        return spec["value"]
    dtype = getattr(torch, spec["dtype"])
    if "range" not in spec:
        return torch.randn(spec["shape"], generator=generator).to(device, dtype)
    low, high = spec["range"]
    drawn = torch.randint(low, high + 1, spec["shape"], generator=generator)
    kept = spec.get("kept", {})
    for token in set(kept.values()):
        drawn[drawn == token] = low  # nowhere but in its own places
    for place, token in kept.items():
        drawn.view(-1)[int(place)] = token
    return drawn.to(device, dtype)


def sample_values(output: Tensor) -> list[float]:
    """The values of an output that a probe records, evenly spread."""
    flat = output.float().flatten()
    return flat[:: max(1, len(flat) // VALUES)][:VALUES].tolist()
