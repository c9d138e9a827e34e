"""FLOPs of what runs, counted while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from latte_convert import compat


def measured_flops(call: Callable[[], Any]) -> tuple[int, str]:
    """Count the FLOPs of what runs with ``torch.utils.flop_counter``.

    Returns:
        The count, and which backend ran ``scaled_dot_product_attention``: ``flash``, ``efficient``, ``cudnn``, or
        ``math`` for plain matrix products. PyTorch's counter does not know the CPU's flash attention; it is counted
        by PyTorch's own formula for the others.
    """
    flash = compat.CPU_ATTENTION.get()
    with FlopCounterMode(display=False, custom_mapping={} if flash is None else {flash: _sdpa}) as counter:
        call()
    operators = " ".join(str(operator) for operator in counter.get_flop_counts().get("Global", {}))
    backend = next((name for name in ("flash", "efficient", "cudnn") if f"_{name}_attention" in operators), "math")
    return counter.get_total_flops(), backend


def _sdpa(query: Any, key: Any, value: Any, *_args: Any, out_shape: Any = None, **_kwargs: Any) -> int:
    """Both matmuls; what the counter gives are shapes, ``(B, H, N, d)``."""
    batch, heads, queries, width = query
    return 2 * int(batch * heads * queries * key[2]) * int(width + value[3])
