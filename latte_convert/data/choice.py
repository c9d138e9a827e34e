"""The one seeded choice among samples: by a hash of seed and name, on no generator's version and on no other sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def seeded_order(count: int, name: Callable[[int], str], seed: int) -> list[int]:
    """Indices in the order of 64 bits of a hash of seed and name; equal ones stay in their own order."""

    def key(index: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed}\0{name(index)}".encode()).digest()[:8], "big")

    keys = np.fromiter(map(key, range(count)), dtype=np.uint64, count=count)
    order: list[int] = np.argsort(keys, kind="stable").tolist()
    return order


def choose(items: Sequence[T], samples: int | None, seed: int, name: Callable[[T], str]) -> list[T]:
    """At most ``samples`` items, the first of the seeded order, but in their own order; all where it is None."""
    if samples is None or samples >= len(items):
        return list(items)
    chosen = seeded_order(len(items), lambda index: name(items[index]), seed)[:samples]
    return [items[index] for index in sorted(chosen)]
