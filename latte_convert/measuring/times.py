"""How long a model takes end to end: original, hybrid, and with attention left out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from latte_convert.adapters.convert import Changes
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionSite, SiteCall
from latte_convert.data.feed import Feed, Inputs

TURNS = 4
"""Times that a model is timed at most."""
SETTLED = 1.05
"""The second shortest of some runs is at most this many times the shortest where the shortest is to be relied on."""


@dataclass(frozen=True)
class AttentionTime:
    """How much of a pass over one sample is softmax attention, projections not counted.

    Attributes:
        tokens: Most keys of a call.
        original_ms: Wall time of the original.
        without_ms: Wall time with the attention of all sites left out.
    """

    tokens: int
    original_ms: float
    without_ms: float

    @property
    def share(self) -> float:
        """Of the original's time."""
        return max(0.0, 1 - self.without_ms / self.original_ms)

    def ceiling(self, times: float = 1.0) -> float:
        """Speed-up that no attention kernel can pass (Amdahl) at ``times`` as many tokens.

        Attention takes time as the square of the tokens, all else in proportion to them.
        """
        return 1 + times * max(0.0, self.original_ms / self.without_ms - 1)

    def __str__(self) -> str:
        """In words."""
        longer = ", ".join(f"{self.ceiling(times):.2f} at {times * self.tokens:,}" for times in (2, 4))
        return (
            f"attention takes {self.share:.0%} of a pass at {self.tokens:,} tokens here: no attention kernel can make "
            f"the model more than {self.ceiling():.2f} times as fast (foretold: {longer})"
        )


def attention_time(host: Host, sites: Sequence[AttentionSite], feed: Feed) -> AttentionTime:
    """Time the first sample as it is and without attention, in two turns, of which the first warms every cache.

    Args:
        host: The original; left as it was.
        sites: Those whose attention is left out.
        feed: Samples.
    """
    most = 0

    def nothing_of(call: SiteCall) -> Tensor:
        nonlocal most
        most = max(most, call.key.shape[2])
        return nothing(call)

    inputs = feed[0]
    original, without = [], []
    for _ in range(2):
        original.append(milliseconds(host, inputs))
        with host.watch(dict.fromkeys((site.name for site in sites), nothing_of)):
            without.append(milliseconds(host, inputs))
    return AttentionTime(most, min(original), min(without))


def speedup(host: Host, changes: Changes, feed: Feed, *, min_tokens: int = 0) -> float:
    """How many times faster the hybrid is, end to end: the ratio of the shortest of some runs, taken in turns.

    The first turn also warms every cache; between the turns the load of a machine changes. Turns go on until the two
    shortest runs of either are alike.
    """
    ratios = []
    for inputs in feed:
        original: list[float] = []
        hybrid: list[float] = []
        while not (_settled(original) and _settled(hybrid)) and len(hybrid) < TURNS:
            original.append(milliseconds(host, inputs))
            with host.convert(changes, min_tokens=min_tokens):
                hybrid.append(milliseconds(host, inputs))
        ratios.append(min(original) / min(hybrid))
    return statistics.median(ratios)


def _settled(times: Sequence[float]) -> bool:
    """Whether the two shortest times are alike."""
    return len(times) > 1 and sorted(times)[1] <= SETTLED * min(times)


def nothing(call: SiteCall) -> Tensor:
    """Attention that costs nothing: zeros."""
    return call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])


def milliseconds(host: Host, inputs: Inputs) -> float:
    """Wall time of a second, undisturbed run: the first one has warmed every cache."""
    _synchronize()
    start = time.perf_counter()
    host.run(inputs)
    _synchronize()
    return (time.perf_counter() - start) * 1000


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
