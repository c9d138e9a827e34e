"""From which length on is the hybrid faster?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from latte_convert.bench.result import Crossover, Guard, LengthResult, VariantName

TOLERANCE = 1.03
"""Below its ``min_tokens`` a hybrid may be this much slower than the original: the routing, and noise."""


def find_crossover(points: Sequence[tuple[int, float]]) -> Crossover:
    """The number of tokens from which on every measured length is faster.

    Args:
        points: Number of tokens, and time over the original's; below 1 is faster.

    Returns:
        Between the last slower length and the next one, the point where the ratio is 1 by linear interpolation
        between the logarithms (costs are powers of the length), rounded up. The shortest length, not bracketed,
        where all are faster: nothing is known below it.
    """
    ordered = sorted(points)
    slower = [i for i, (_, ratio) in enumerate(ordered) if ratio >= 1]
    if not ordered or (slower and slower[-1] == len(ordered) - 1):
        return Crossover(tokens=None, bracketed=False)
    if not slower:
        return Crossover(tokens=ordered[0][0], bracketed=False)
    (below, ratio_below), (above, ratio_above) = ordered[slower[-1]], ordered[slower[-1] + 1]
    share = math.log(ratio_below) / (math.log(ratio_below) - math.log(ratio_above))
    tokens = math.exp(math.log(below) + share * (math.log(above) - math.log(below)))
    # At the slower length itself the exact branch must still run.
    return Crossover(tokens=min(max(math.ceil(tokens - 1e-9), below + 1), above), bracketed=True)


def ratios(lengths: Sequence[LengthResult], name: VariantName, *, attention: bool = False) -> list[tuple[int, float]]:
    """Tokens and time over the original's of one variant, where it was measured."""
    found = []
    for length in lengths:
        if (variant := length.variant(name)) is None:
            continue
        ratio = variant.attention_ratio if attention else variant.forward_ratio
        if ratio is not None:
            found.append((length.tokens, ratio))
    return found


def statements(lengths: Sequence[LengthResult], crossover: Crossover, guard: Sequence[Guard]) -> list[str]:
    """What the figures say of the hybrid, in sentences, the unwelcome included."""
    points = sorted(ratios(lengths, "hybrid"))
    longest, last = points[-1]
    lines = []
    if crossover.tokens is None:
        lines.append(f"slower than exact at {longest} tokens, the longest measured ({last:.2f} of its time)")
    elif crossover.bracketed:
        lines.append(f"slower than exact below {crossover.tokens} tokens; faster from there on")
    else:
        lines.append(f"faster than exact from {crossover.tokens} tokens on; nothing shorter was measured")
    if crossover.tokens is not None:
        lines.append(f"at {longest} tokens: {last:.2f} of exact attention's time end to end")
        if any(ratio < 1 for tokens, ratio in points if tokens < crossover.tokens):
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
