"""From which length on is the hybrid faster?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from latte_convert.bench.result import Crossover, Guard, LengthResult, VariantName

TOLERANCE = 1.03
"""Below its ``min_tokens`` a hybrid may be this much slower than the original: the routing, and noise."""


LEAST_LENGTHS = 3
"""A crossover is stated where at least so many lengths were measured."""


class Pace(NamedTuple):
    """How long a variant takes at one length.

    Attributes:
        tokens: The length.
        ratio: Time over the original's, median over rounds; below 1 is faster.
        sure: Whether the quartiles of both lie apart.
    """

    tokens: int
    ratio: float
    sure: bool = True


def find_crossover(paces: Sequence[Pace]) -> Crossover:
    """The number of tokens from which on every measured length is faster, beyond the spread of its measurements.

    Returns:
        Between the last length that is not faster and the next one, the point where the ratio is 1 by linear
        interpolation between the logarithms (costs are powers of the length), rounded up; the next one where the last
        may be as fast. The shortest length, not bracketed, where all are faster: nothing is known below it. None where
        the longest is not faster, or fewer than ``LEAST_LENGTHS`` were measured.
    """
    ordered = sorted(paces)
    others = [i for i, pace in enumerate(ordered) if pace.ratio >= 1 or not pace.sure]
    if len(ordered) < LEAST_LENGTHS or (others and others[-1] == len(ordered) - 1):
        return Crossover(tokens=None, bracketed=False)
    if not others:
        return Crossover(tokens=ordered[0].tokens, bracketed=False)
    below, above = ordered[others[-1]], ordered[others[-1] + 1]
    if not below.sure:
        return Crossover(tokens=above.tokens, bracketed=True)
    share = math.log(below.ratio) / (math.log(below.ratio) - math.log(above.ratio))
    tokens = math.exp(math.log(below.tokens) + share * (math.log(above.tokens) - math.log(below.tokens)))
    # At the slower length itself the exact branch must still run.
    return Crossover(tokens=min(max(math.ceil(tokens - 1e-9), below.tokens + 1), above.tokens), bracketed=True)


def paces(lengths: Sequence[LengthResult], name: VariantName, *, attention: bool = False) -> list[Pace]:
    """The pace of one variant at each length where it was measured."""
    found = []
    for length in lengths:
        variant, original = length.variant(name), length.variant("original")
        if variant is None or original is None:
            continue
        ratio = variant.attention_ratio if attention else variant.forward_ratio
        own, other = (v.attention if attention else v.forward for v in (variant, original))
        if ratio is not None and own is not None and other is not None:
            apart = own.upper_ms < other.lower_ms or other.upper_ms < own.lower_ms
            found.append(Pace(length.tokens, ratio, apart))
    return found


def statements(lengths: Sequence[LengthResult], crossover: Crossover, guard: Sequence[Guard]) -> list[str]:
    """What the figures say of the hybrid, in sentences, the unwelcome included."""
    points = sorted(paces(lengths, "hybrid"))
    longest, last, sure = points[-1]
    lines = []
    if crossover.tokens is None:
        pace = ("slower than" if last > 1 else "faster than") if sure else "as fast as"
        lines.append(f"{pace} exact at {longest} tokens, the longest measured ({last:.2f} of its time)")
        if len(points) < LEAST_LENGTHS:
            lines.append(f"from which length on it is faster takes {LEAST_LENGTHS} lengths to say")
    elif crossover.bracketed:
        lines.append(f"not faster than exact below {crossover.tokens} tokens; faster from there on")
    else:
        lines.append(f"faster than exact from {crossover.tokens} tokens on; nothing shorter was measured")
    if crossover.tokens is not None:
        lines.append(f"at {longest} tokens: {last:.2f} of exact attention's time end to end")
        if any(p.sure and p.ratio < 1 for p in points if p.tokens < crossover.tokens):
            lines.append("not monotonic: some shorter lengths were faster too; measure again on an idle machine")
    for check in guard:
        verdict = "bit-identical" if check.identical else "NOT identical"
        speed = "" if check.forward_ratio <= TOLERANCE else f", more than {TOLERANCE - 1:.0%} slower: noise, or a fault"
        lines.append(
            f"below min_tokens, at {check.tokens} tokens: {verdict} to the original, "
            f"{check.forward_ratio:.2f} of its time{speed}"
        )
    return lines + _rivals(lengths)


def _rivals(lengths: Sequence[LengthResult]) -> list[str]:
    """Where a simpler method is both at least as fast and closer to the original, say so."""
    lines = []
    names: dict[VariantName, str] = {"pooled": "pooling keys and values", "merged": "merging tokens"}
    for length in lengths:
        hybrid = length.variant("hybrid")
        for name, words in names.items():
            rival = length.variant(name)
            if rival is None or hybrid is None or rival.cosine is None or hybrid.cosine is None:
                continue
            if (rival.forward_ratio or math.inf) <= (hybrid.forward_ratio or 0) and rival.cosine > hybrid.cosine:
                lines.append(f"at {length.tokens} tokens {words} is as fast and closer to the original")
    return lines
