"""Names and numbers in a message: a few of many, rounded so that they do not flatter, safe on a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from decimal import ROUND_FLOOR, Decimal

_KEPT = "\n\t"
_UNSAFE = {"Cc", "Cs", "Zl", "Zp"} | {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Categories and directions of Unicode that move the cursor, break a line or turn the writing; ``Cs`` has no bytes."""


def some(names: Iterable[object], most: int = 3, separator: str = ", ") -> str:
    """The first few of some names: ``"a, b, c, …"``; the ellipsis stands for the rest."""
    found = [str(name) for name in names]
    return separator.join(found[:most] + ["…"] * (len(found) > most))


def rounded_down(value: float, digits: int = 4) -> str:
    """A number that never reads higher than it is: only a perfect agreement reads ``1.0000``."""
    if not math.isfinite(value):
        return str(value)
    # Of the shortest decimal that means this float: 0.57 is 57.00%, though its binary value is a little less.
    return str(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR))


def percent_down(share: float) -> str:
    """A share in percent with two digits, rounded down: ``"99.98%"``."""
    return f"{Decimal(repr(float(share))).scaleb(2).quantize(Decimal('0.01'), ROUND_FLOOR)}%"


def printable(text: str) -> str:
    r"""Text from outside that a terminal cannot take for a command: escape codes become ``\x1b`` and the like."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in _KEPT or not _unsafe(c) else c.encode("unicode_escape").decode() for c in text)


def _unsafe(character: str) -> bool:
    return bool(_UNSAFE & {unicodedata.category(character), unicodedata.bidirectional(character)})


def duration(seconds: float) -> str:
    """A time as people say it: ``"45 s"``, ``"12 min"``, ``"3.5 h"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
