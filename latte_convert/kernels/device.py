"""Which calls run in Triton kernels: those on an NVIDIA GPU that nobody differentiates, compiles or counts.

Triton is imported when the first of them arrives. Triton's own variable ``TRITON_INTERPRET=1`` has its interpreter run
the kernels on a CPU, slowly: for tests.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor

from latte_convert import compat
from latte_convert.attention import AttentionCall
from latte_convert.errors import first_line

WIDEST = 128
"""Most channels of a head: what a block of tokens and its sums leave room for in the registers of a GPU."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (8, 0)
"""Compute capability from which a card has bfloat16 and TF32."""


def runs_in_triton(call: AttentionCall, *parameters: Tensor | None) -> bool:
    """Whether a Triton kernel serves a call; PyTorch's operators serve every other.

    Args:
        call: The call.
        *parameters: The kernel's own tensors that enter the result.
    """
    if torch.compiler.is_compiling():  # a compiler and an exporter follow PyTorch's operators
        return False
    tokens = (call.query, call.key, call.value)
    served = all(type(x) is Tensor and x.dtype is tokens[0].dtype and x.numel() for x in tokens)
    if not served or tokens[0].dtype not in DTYPES or max(x.shape[-1] for x in tokens) > WIDEST:
        return False
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, *parameters) if x is not None)
    if learning or _watched():
        return False
    device = call.query.device
    return _compiles(device) if device.type == "cuda" else device.type == "cpu" and interpreted()


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _watched() -> bool:
    """Whether somebody looks at every operator, such as a counter of FLOPs; and ``torch.jit.trace``."""
    jit: Any = torch.jit
    modes = compat.DISPATCH_MODES.get()
    return bool(jit.is_tracing() or (modes and modes()))


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton compiles for a card; says once why it does not."""
    if torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        reason = "the card is older than compute capability 8.0"
    else:
        try:
            from triton.runtime import driver

            driver.active.get_current_target()  # builds its launcher, which takes a C compiler
        except Exception as error:  # whatever it is, PyTorch goes on without
            reason = f"Triton cannot be used ({first_line(error)}): pip install triton, and a C compiler such as gcc"
        else:
            return True
    logging.getLogger("latte_convert").warning(
        "attention kernels run in PyTorch on %s, several times slower than their Triton kernels would: %s",
        device,
        reason,
    )
    return False
