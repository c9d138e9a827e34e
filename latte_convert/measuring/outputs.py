"""What a model returned: its outputs by name, and those that stand for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from latte_convert.data.feed import Inputs
from latte_convert.errors import CheckpointError
from latte_convert.measuring.agreement import Agreement, kind_of, sureness

_MODEL_OUTPUTS = ("image_embeds", "text_embeds", "logits", "last_hidden_state", "feature_maps")
_TOWER_OUTPUTS = ("pooler_output", "last_hidden_state")
_LISTS = ("output", "feature_maps", "pooler_output", "deepstack_features")
"""Outputs whose items, where there are several, are equals: a pyramid of maps, the features of several images."""
_LEFT_OUT = ("attentions", "past_key_values", "cache")
"""What a model returns besides its outputs: attention weights, and the state of a decoder."""


def primary_output(names: Iterable[str], *, tower: bool = False) -> str:
    """The output that stands for a model, or, pooled and projected, for one tower of it.

    Raises:
        CheckpointError: There is no output.
    """
    known = list(names)
    if not known:
        raise CheckpointError(
            "the model returns no floating-point tensor with a feature dimension, so there is nothing to compare: give "
            "inputs with which it returns one."
        )
    wanted = _TOWER_OUTPUTS if tower else _MODEL_OUTPUTS
    return next((name for output in wanted for name in known if _group(name) == output), known[0])


def named_outputs(output: Any, prefix: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Floating-point outputs with a feature dimension, by name.

    Args:
        output: What a model returned: a tensor, a tuple, or a mapping such as a ``ModelOutput``. Items of tuples and
            lists in it are outputs of their own: ``hidden_states.2``.
        prefix: Where positive, ``last_hidden_state`` is also split into ``.prefix`` and ``.patches``.
    """
    for name, value in _tensors(output):
        if not value.is_floating_point() or value.dim() < 2:
            continue
        yield name, value
        if prefix and name == "last_hidden_state" and value.shape[1] > prefix:
            yield f"{name}.prefix", value[:, :prefix]
            yield f"{name}.patches", value[:, prefix:]


def _tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, and those in tuples and lists of it."""
    items = output.items() if isinstance(output, Mapping) else [("output", output)]
    left = [(str(key), value) for key, value in items if not str(key).endswith(_LEFT_OUT)][::-1]
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple | list):
            left += [(f"{name}.{number}", item) for number, item in enumerate(value)][::-1]


def final_outputs(output: Any, inputs: Inputs) -> dict[str, Tensor]:
    """The outputs that stand for a model: the primary one, and its equals.

    These are the embeddings of other towers, what a detector predicts beside its logits, and the other items of a list.

    Args:
        output: What the model, or one tower of it, returned.
        inputs: What it was called with.

    Returns:
        Tensors ``(..., D)`` by name, with the tower in front where one tower ran.

    Raises:
        CheckpointError: There is no output.
    """
    named = dict(named_outputs(output))
    primary = primary_output(named, tower=bool(inputs.tower))
    place = f"{inputs.tower}." if inputs.tower else ""
    return {place + name: tensor for name, tensor in named.items() if name == primary or _equals(name, primary)}


def _group(name: str) -> str:
    """The output that an item belongs to: ``feature_maps`` of ``feature_maps.2``."""
    return name.partition(".")[0]


def _equals(name: str, primary: str) -> bool:
    """Whether an output is as much what the model is for as its primary one."""
    if _group(name) in _LISTS and _group(name) == _group(primary):
        return True
    if primary.endswith("_embeds"):
        return name.endswith("_embeds")
    if primary == "pooler_output" or primary.startswith("pooler_output."):
        return _group(name) == "deepstack_features"
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
