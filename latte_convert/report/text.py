"""Numbers and names as the page shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from latte_convert.wording import rounded_down


def dotted(name: str) -> Markup:
    """A module's name, escaped, that a narrow column breaks after its dots."""
    return Markup(".<wbr>").join(escape(part) for part in name.split("."))


def number(value: float) -> str:
    """Three significant digits, trailing zeros kept."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def times(value: float) -> str:
    """A ratio, rounded down to two decimals, so that a gain never looks better than it is."""
    return f"{rounded_down(value, 2)}x"


def percent(value: float) -> str:
    """A share as a percentage with one decimal; what is not nothing never reads as nothing."""
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def flops(value: float) -> str:
    """FLOPs in a unit that keeps the number short."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}FLOPs"
    return f"{value:,.0f} FLOPs"


def size(value: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def count(value: float) -> str:
    """A whole number, thousands apart."""
    return f"{value:,.0f}"


def values(values: Sequence[float]) -> str:
    """The value of a layer, or the range over its heads."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(min(values))} to {number(max(values))} ({len(values)} heads)"


def options(options: Mapping[str, Any]) -> str:
    """A kernel's options in a line: switches by their name, the others with their value."""
    words = []
    for name, value in options.items():
        if value is True or value is False:
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name} {setting(value)}")
    return ", ".join(words)


def setting(value: Any) -> str:
    """A setting as its YAML would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
