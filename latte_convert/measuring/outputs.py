"""What a model returned: its outputs by name, and those that stand for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from latte_convert.data.feed import Inputs
from latte_convert.measuring.agreement import Agreement, kind_of, sureness

_MODEL_OUTPUTS = ("image_embeds", "text_embeds", "logits", "last_hidden_state")
_TOWER_OUTPUTS = ("pooler_output", "last_hidden_state")


def primary_output(names: Iterable[str], *, tower: bool = False) -> str:
    """The output that stands for a model, or, pooled and projected, for one tower of it."""
    known = list(names)
    return next((name for name in (_TOWER_OUTPUTS if tower else _MODEL_OUTPUTS) if name in known), known[0])


def named_outputs(output: Any, prefix: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Floating-point outputs with a feature dimension, by name.

    Args:
        output: What a model returned: a tensor, a tuple, or a mapping such as a ``ModelOutput``.
        prefix: Where positive, ``last_hidden_state`` is also split into ``.prefix`` and ``.patches``.
    """
    if isinstance(output, Tensor):
        output = {"output": output}
    if isinstance(output, tuple | list):
        output = {f"output.{i}": item for i, item in enumerate(output)}
    for name, value in output.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            continue
        yield name, value
        if prefix and name == "last_hidden_state" and value.shape[1] > prefix:
            yield f"{name}.prefix", value[:, :prefix]
            yield f"{name}.patches", value[:, prefix:]


def final_outputs(output: Any, inputs: Inputs) -> dict[str, Tensor]:
    """The outputs that stand for a model: the primary one, and its equals.

    These are the embeddings of other towers, and what a detector predicts beside its logits.

    Args:
        output: What the model, or one tower of it, returned.
        inputs: What it was called with.

    Returns:
        Tensors ``(..., D)`` by name, with the tower in front where one tower ran.
    """
    named = dict(named_outputs(output))
    primary = primary_output(named, tower=bool(inputs.tower))
    place = f"{inputs.tower}." if inputs.tower else ""
    return {place + name: tensor for name, tensor in named.items() if name == primary or _equals(name, primary)}


def _equals(name: str, primary: str) -> bool:
    """Whether an output is as much what the model is for as its primary one."""
    if primary.endswith("_embeds"):
        return name.endswith("_embeds")
    return primary == "logits" and name.startswith("pred_")


def add_outputs(
    agreements: dict[str, Agreement], model: nn.Module, original: Mapping[str, Tensor], converted: Mapping[str, Tensor]
) -> None:
    """Add the outputs of one sample to their agreements, each weighed as what it is; new names are entered.

    Args:
        agreements: By output.
        model: The model, for its number of classes.
        original: The original's outputs.
        converted: The hybrid's, under the same names.
    """
    logits = original.get("logits")
    for name, tensor in original.items():
        known = agreements.setdefault(name, Agreement(kind_of(name, tensor)))
        sure = None
        if known.kind == "boxes" and logits is not None and logits.shape[:-1] == tensor.shape[:-1]:
            sure = sureness(logits, getattr(getattr(model, "config", None), "num_labels", None))
        known.add(tensor, converted[name], sure)
