"""How many tokens each block works on: which blocks can merge, and the lightest merging that is fast enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import merges_of
from latte_convert.attention import AttentionSite, SiteCall
from latte_convert.data.feed import Feed
from latte_convert.errors import CheckpointError, first_line

BENDS = (1.0, 0.6, 0.35)
"""Schedules that are tried: 1 merges as many tokens after each block, less merges most of them after the first ones,
which is faster where attention takes most of the time."""
LEAST = 0.1
"""Smallest share of its tokens that the last block may be left with by the tool itself."""
_STEPS = 3


@dataclass(frozen=True)
class Mergeable:
    """The blocks of a model whose tokens can be merged.

    Attributes:
        blocks: By name, in order of execution; empty where there are none.
        reason: Why there are none.
    """

    blocks: tuple[str, ...] = ()
    reason: str = ""


def schedule(blocks: Sequence[str], left: float, bend: float = 1.0) -> dict[str, float]:
    """Share of the tokens that each block works on: 1 for the first, ``left`` for the last."""
    last = max(len(blocks) - 1, 1)
    return {block: round(1 - (1 - left) * (index / last) ** bend, 4) for index, block in enumerate(blocks)}


def mergeable(host: Host, sites: Sequence[AttentionSite], feed: Feed) -> Mergeable:
    """The blocks whose tokens can be merged: the longest run of blocks, one after another, that hold one site each.

    Each is plain self-attention that is eligible. Whether the model bears it is tried on the first input: blocks that
    get a mask, or positions of all tokens from outside, do not.
    """
    blocks = max(_runs(host, sites), key=len, default=[])
    if len(blocks) < 2:
        return Mergeable(reason="it has no two blocks in a row of plain, eligible self-attention")
    for inputs in feed:
        reason = _tried(host, blocks, sites, inputs)
        return Mergeable(reason=reason) if reason else Mergeable(tuple(blocks))
    return Mergeable(reason="there is no sample to try it on")


def _runs(host: Host, sites: Sequence[AttentionSite]) -> list[list[str]]:
    """Blocks of one list that follow each other, each with one site that can be merged around."""
    inside: dict[str, list[AttentionSite]] = {}
    for site in sites:
        inside.setdefault(host.block(site.name), []).append(site)
    runs: list[list[str]] = []
    before: tuple[str, int] | None = None
    for block, found in inside.items():
        around, _, number = block.rpartition(".")
        plain = len(found) == 1 and found[0].eligible and found[0].kind == "self" and not found[0].causal
        if not plain or not number.isdigit() or found[0].name == block:
            before = None
            continue
        if before != (around, int(number) - 1):
            runs.append([])
        runs[-1].append(block)
        before = around, int(number)
    return runs


def _tried(host: Host, blocks: Sequence[str], sites: Sequence[AttentionSite], inputs: object) -> str | None:
    """Why the model does not bear merging in these blocks, as one input shows; or None."""
    seen: dict[str, list[SiteCall]] = {}

    def note(name: str) -> Callable[[SiteCall], None]:
        return lambda call: seen.setdefault(name, []).append(call)

    names = [site.name for site in sites if host.block(site.name) in blocks]
    with host.watch({name: note(name) for name in names}):
        host.run(inputs)  # type: ignore[arg-type]
    for name in names:
        calls = seen.get(name, [])
        if len(calls) != 1:
            return f"{name} runs {len(calls)} times in a pass"
        call = calls[0]
        if call.mask is not None or call.causal or not call.layout.aligned:
            return f"{name} has a mask, or attends to other tokens than its own"
        if call.obstacle is not None:
            return f"{name}: {call.obstacle}"
    first = seen[names[0]][0]
    towers = {site.tower for site in sites if site.name in names}
    if towers == {"vision"} and first.layout.grid is None:
        return "it is not known which of its tokens are patches of the image"
    behind = first.key.shape[2] - first.layout.prefix
    if behind < 4 * len(blocks):
        return f"its blocks work on {behind} tokens, too few to merge"
    try:
        with host.convert(merges_of(schedule(blocks, 0.5))) as applied:
            host.run(inputs)  # type: ignore[arg-type]
            last = applied.shapes[names[-1]].keys
    except (RuntimeError, ValueError, TypeError, IndexError, CheckpointError) as error:
        return f"it does not run on fewer tokens ({first_line(error)})"
    if last > first.layout.prefix + 0.5 * behind + 1:
        return "something between its blocks puts the tokens into new memory"
    return None


@dataclass
class Clock:
    """How long the model takes with a schedule, as a share of the original's time: measured, and foretold.

    The time of a block is taken to grow with its number of tokens and with the square of it:
    ``c + a·mean(share) + b·mean(share²)``, fitted to what has been measured, with ``a`` and ``b`` not negative.

    Attributes:
        blocks: The blocks, in order of execution.
        speed: Measures how many times faster than the original a schedule is.
        whole: How many times faster it is with all tokens.
    """

    blocks: Sequence[str]
    speed: Callable[[Mapping[str, float]], float]
    whole: float = 1.0
    _seen: list[tuple[float, float, float, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Measure half of the tokens and as few as may be."""
        self._seen.append((1.0, 1.0, 1.0, 1 / self.whole))
        for left, bend in ((0.5, 1.0), (LEAST, BENDS[-1])):
            self.time(schedule(self.blocks, left, bend))

    def time(self, shares: Mapping[str, float]) -> float:
        """Measured."""
        time = 1 / self.speed(shares)
        self._seen.append((*_terms(shares), time))
        return time

    def left(self, time: float, bend: float) -> float:
        """Share of its tokens that leaves the model with a time, as foretold; ``LEAST`` where none does."""
        factors, shares = _fitted(np.array(self._seen)), np.linspace(1.0, LEAST, 1000)
        times = (np.dot(factors, _terms(schedule(self.blocks, share, bend))) for share in shares)
        return next((float(share) for share, each in zip(shares, times, strict=True) if each <= time + 1e-9), LEAST)


def _terms(shares: Mapping[str, float]) -> tuple[float, float, float]:
    """What the time of a schedule is a sum of."""
    values = np.array(list(shares.values()))
    return 1.0, float(values.mean()), float((values**2).mean())


def _fitted(seen: np.ndarray) -> np.ndarray:
    """Factors of the terms by least squares; those of tokens and of their squares are not negative."""
    terms, times = seen[:, :3], seen[:, 3]
    for used in ([0, 1, 2], [0, 2], [0, 1]):
        factors = np.zeros(3)
        factors[used] = np.linalg.lstsq(terms[:, used], times, rcond=None)[0]
        if (factors[1:] >= 0).all():
            break
    return factors


def lightest(clock: Clock, target: float, bend: float) -> dict[str, float] | None:
    """The schedule that merges least among those that are fast enough; None where none is found.

    Args:
        clock: Of the model with the kernels of a plan.
        target: The least speed-up that is fast enough.
        bend: As in ``schedule``.
    """
    aim = 1 / target
    for _ in range(_STEPS):
        shares = schedule(clock.blocks, clock.left(aim, bend), bend)
        time = clock.time(shares)
        if time <= 1 / target:
            return shares
        aim -= time - 1 / target
    return None
