"""The probe: a seeded random input of a real sample's shape, and the hybrid's answer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latte_convert.artifact.manifest import ProbeRecord
from latte_convert.errors import IntegrityError, first_line
from latte_convert.measuring.outputs import named_outputs, primary_output

if TYPE_CHECKING:
    from latte_convert.data.feed import Feed

SEED = 20261130
VALUES = 64


def record_probe(model: nn.Module, feed: Feed) -> ProbeRecord | None:
    """Run the hybrid on a seeded random input of the shape of the first sample of ``feed``.

    No sample is stored: floats are normal noise, integers are drawn from the sample's range, masks are ones.
    """
    sample = next(iter(feed))
    inputs = {key: _describe(key, value) for key, value in sample.kwargs.items()}
    method = sample.method
    name, output = answer(model, method, inputs, SEED)
    return ProbeRecord(
        seed=SEED,
        inputs=inputs,
        method=method,
        output=name,
        values=sample_values(output),
    )


def renewed_probe(model: nn.Module, probe: ProbeRecord) -> ProbeRecord:
    """The same question with the answer that a model has to it now."""
    _, output = answer(model, probe.method, probe.inputs, probe.seed, probe.output)
    return probe.model_copy(update={"values": sample_values(output)})


def probe_difference(model: nn.Module, probe: ProbeRecord) -> float:
    """Largest difference of the model's answer from the recorded one, relative to the output's scale.

    Raises:
        IntegrityError: The model's answer has another form.
    """
    try:
        _, output = answer(model, probe.method, probe.inputs, probe.seed, probe.output)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError) as error:
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
    device = next(model.parameters()).device
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


def _draw(spec: dict[str, Any], generator: torch.Generator, device: torch.device) -> Any:
    if "value" in spec:
        return spec["value"]
    dtype = getattr(torch, spec["dtype"])
    if "range" in spec:
        low, high = spec["range"]
        return torch.randint(low, high + 1, spec["shape"], generator=generator).to(device, dtype)
    return torch.randn(spec["shape"], generator=generator).to(device, dtype)


def sample_values(output: Tensor) -> list[float]:
    """The values of an output that a probe records, evenly spread."""
    flat = output.float().flatten()
    return flat[:: max(1, len(flat) // VALUES)][:VALUES].tolist()
