"""An attention map as a picture."""

from __future__ import annotations

import base64
import io

from latte_convert.measuring.map_result import AttentionMap, Heatmap
from latte_convert.report.palette import RAMP


def heatmap_uri(map_: AttentionMap, heatmap: Heatmap) -> str:
    """A map as a PNG of one pixel per cell, in a ``data:`` address."""
    from PIL import Image

    rows, columns = map_.shape
    image = Image.frombytes("P", (columns, rows), base64.b64decode(heatmap.levels))
    image.putpalette([channel for level in range(256) for channel in ramp(level / 255)])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def ramp(share: float) -> tuple[int, int, int]:
    """The colour at ``share`` (0 to 1) of the way along ``RAMP``."""
    at = share * (len(RAMP) - 1)
    index = min(int(at), len(RAMP) - 2)
    low, high = RAMP[index], RAMP[index + 1]
    red, green, blue = (round(a + (b - a) * (at - index)) for a, b in zip(low, high, strict=True))
    return red, green, blue
