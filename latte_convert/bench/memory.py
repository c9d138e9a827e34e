"""Peak memory of a call, on top of what was there before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from latte_convert import compat


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes of tensors that a call holds at its peak, weights and inputs not counted.

    On CUDA the allocator is asked. Elsewhere a dispatch mode follows the storage of every tensor from its making to
    its end: exact for what operators return, blind to scratch space inside a single operator. It cannot look into
    compiled code.

    Args:
        call: What to measure; its result counts as held.
        device: Where it runs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    meter = _Meter()
    with meter:
        call()
    return meter.peak


class _Meter(compat.DISPATCH_MODE.kind()):  # type: ignore[misc]
    """Adds up the storages that operators make while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; what it returns and did not get is new."""
        for storage in _storages((args, kwargs)):
            self._track(storage, 0)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._track(storage, storage.nbytes())
        return out

    def _track(self, storage: Any, size: int) -> None:
        key = id(storage)
        if key in self._known:
            return

        def free(_: object) -> None:
            del self._known[key]
            self._now -= size

        self._known[key] = weakref.ref(storage, free)
        self._now += size
        self.peak = max(self.peak, self._now)


def _storages(tree: Any) -> Iterator[Any]:
    for leaf in compat.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
