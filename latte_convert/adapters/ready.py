"""Whether a loaded model runs as it is written, with weights of its own: what converting it in place takes."""

from __future__ import annotations

from torch import nn

from latte_convert import compat
from latte_convert.errors import CheckpointError
from latte_convert.wording import some

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Modules around a model that keep or copy what it computed before, and the attribute with the model itself."""


def check_ready(model: nn.Module) -> None:
    """Refuse a model that would not run what is put into it.

    Raises:
        CheckpointError: It is wrapped, compiled in place, or has its weights elsewhere; the message says what to give.
    """
    kind = type(model).__name__
    if kind in _WRAPPERS:
        raise CheckpointError(
            f"this is a model inside of {kind}: give the model itself, model.{_WRAPPERS[kind]}, and wrap or compile "
            "the hybrid."
        )
    compiled = [name or kind for name, module in model.named_modules() if compat.compiled_in_place(module)]
    if compiled:
        raise CheckpointError(
            f"this {kind} was compiled in place ({some(compiled)}), and compiled code does not see what is converted: "
            "load the model anew, convert it, then compile the hybrid."
        )
    absent = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if absent:
        raise CheckpointError(
            f"this {kind} has no weights in memory ({some(absent)} on the meta device): it was offloaded to disk or to "
            "the CPU, or never loaded. Load it whole, without a device_map that offloads and without cpu_offload or "
            "disk_offload; a hybrid can be offloaded later."
        )
