"""Colours of the page and of the charts."""

from __future__ import annotations

LIGHT = {
    "bg": "#fdfcfa", "surface": "#f5f1ea", "text": "#25211c", "muted": "#665e54", "line": "#ddd6ca",
    "accent": "#8c4a12", "exact": "#566271", "third": "#1d6b66", "fourth": "#6a3d9a", "fifth": "#9c2f5c",
    "shade": "#25211c24",
}  # fmt: skip
DARK = {
    "bg": "#171513", "surface": "#221f1b", "text": "#ece7df", "muted": "#aea599", "line": "#3f3932",
    "accent": "#e2a365", "exact": "#9aa7b6", "third": "#6cc5bd", "fourth": "#c3a1ea", "fifth": "#ef92b6",
    "shade": "#00000099",
}  # fmt: skip
RAMP = ((0xFB, 0xF5, 0xEA), (0xE2, 0xA3, 0x65), (0x8C, 0x4A, 0x12), (0x24, 0x11, 0x02))
"""Colours of an attention map, from none to its peak: lightness falls all the way, so it also reads without colour."""


def declarations(colours: dict[str, str]) -> str:
    """The colours as CSS custom properties."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
