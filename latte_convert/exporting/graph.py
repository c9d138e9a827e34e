"""A part of a model as a graph of ``torch.export``."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor

from latte_convert import compat
from latte_convert.errors import CheckpointError, first_line, is_shortage
from latte_convert.exporting.parts import Part


def capture(part: Part) -> Any:
    """The graph of a part, a ``torch.export.ExportedProgram`` that takes its inputs by name.

    Raises:
        CheckpointError: It cannot be exported: its control flow depends on the values of tensors, or on a size that is
            to stay open.
    """
    # The last size is none that a model treats apart: neither its own nor square.
    inputs = part.inputs.make(2, part.inputs.sizes()[-1])
    try:
        with torch.no_grad(), quiet_torch(), _no_idle_masks(), _open_lengths(part):
            return torch.export.export(part, (), inputs, dynamic_shapes=part.inputs.axes())
    except Exception as error:  # whatever a model's own code does with tensors that have no values
        if is_shortage(error):
            raise
        raise CheckpointError(f"{type(part.model).__name__} cannot be exported: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What PyTorch says, in short: which value or size a model's code has to know."""
    message = str(error)
    if closed := re.search(r"Constraints violated \(([^)]+)\)", message):
        return f"its code computes something else for every {closed[1]}"
    if "data-dependent" in message:
        return "its control flow depends on the values of tensors"
    return first_line(error)


@contextmanager
def _open_lengths(part: Part) -> Iterator[None]:
    """Have ``len`` of a tensor in a model's code leave the size open: Python's own makes a number of it."""

    def length(of: Any) -> Any:
        return of.shape[0] if isinstance(of, Tensor) and of.dim() else len(of)

    homes = {name for name in (type(module).__module__ for module in part.modules()) if name in sys.modules}
    spaces = [vars(sys.modules[name]) for name in homes if name.partition(".")[0] != "torch"]
    for space in spaces:
        space["len"] = length
    try:
        yield
    finally:
        for space in spaces:
            space.pop("len", None)


@contextmanager
def _no_idle_masks() -> Iterator[None]:
    """Have Transformers leave out a mask that hides nothing, as it does outside of an export."""
    if compat.MASK_LEFT_OUT.get() is None:
        yield
        return
    import transformers.masking_utils

    masks: Any = transformers.masking_utils
    own = masks._ignore_bidirectional_mask_sdpa

    def left_out(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        return bool(padding_mask is None and local_attention_size is None) or own(
            padding_mask, kv_length, local_attention_size
        )

    masks._ignore_bidirectional_mask_sdpa = left_out
    try:
        yield
    finally:
        masks._ignore_bidirectional_mask_sdpa = own


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep the reports of PyTorch's exporters off the screen: what went wrong is raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
