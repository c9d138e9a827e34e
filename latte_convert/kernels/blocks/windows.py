"""Windows of neighbouring queries and the regions around them: slices of a curve that visits all tokens."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor


class Slices(NamedTuple):
    """A line of tokens cut into windows of equal size; the last one may reach over its end.

    Attributes:
        tokens: Number of tokens, N.
        number: Number of windows, W.
        size: Tokens of a window, n.
        halo: Tokens on each side of a window that its region has on top.
    """

    tokens: int
    number: int
    size: int
    halo: int

    @classmethod
    def of(cls, tokens: int, window: int, region: int) -> Slices:
        """Windows of about ``window`` tokens with regions of about ``region``."""
        size = ceil(tokens / max(1, round(tokens / window)))
        number = ceil(tokens / size)
        return cls(tokens, number, size, max(region - size + 1, 0) // 2 if number > 1 else 0)

    @property
    def padded(self) -> int:
        """Places of all windows, those over the end included."""
        return self.number * self.size

    @property
    def region(self) -> int:
        """Places of a region, those over an end included."""
        return self.size + 2 * self.halo

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token of each place of the regions laid end to end, ``(halo + W·n + halo,)``, and whether there is one.

        A place over an end has the token at that end, which is in the same regions.
        """
        line = torch.arange(-self.halo, self.padded + self.halo, device=device)
        token = line.clamp(0, self.tokens - 1)
        return token, token == line

    def windows(self, rows: Tensor) -> Tensor:
        """``(G, halo + W·n + halo, ...)`` to ``(G, W, n, ...)``, a view."""
        own = rows[:, self.halo : self.halo + self.padded]
        return own.view(rows.shape[0], self.number, self.size, *rows.shape[2:])

    def regions(self, rows: Tensor) -> Tensor:
        """``(G, halo + W·n + halo, ...)`` to ``(G, W, n + 2·halo, ...)``, a view with overlaps."""
        return rows.unfold(1, self.region, self.size).movedim(-1, 2)


def along_curve(places: Tensor) -> Tensor:
    """Order in which a Hilbert curve visits tokens, ``(B, N)``, int64.

    An area that is longer than wide is cut into squares, which are visited one after the other; the curve of each
    ends beside the beginning of the next.

    Args:
        places: ``(B, N, 2)``, floating: row and column of each token, in any unit.
    """
    low, high = places.amin(1, keepdim=True), places.amax(1, keepdim=True)
    step = ((high - low).amax(-1, keepdim=True) / max(places.shape[1] - 1, 1)).clamp_min(torch.finfo(low.dtype).tiny)
    places, extent = places - low, (high - low).clamp_min(step)
    long = extent.argmax(-1, keepdim=True)
    along, across = (x.gather(2, i.expand(*x.shape[:2], 1))[..., 0] for x in (places,) for i in (long, 1 - long))
    length, width = extent.amax(-1), extent.amin(-1)
    squares = (length / width).round()
    bits = 1 + (places.shape[1] - 1).bit_length() // 2
    cells = 1 << bits
    along = (along * squares * cells / length).long().clamp_max((squares * cells).long() - 1)
    across = (across * cells / width).long().clamp_max(cells - 1)
    return ((along >> bits << 2 * bits) + _hilbert(along & (cells - 1), across, bits)).argsort(dim=1, stable=True)


def _hilbert(x: Tensor, y: Tensor, bits: int) -> Tensor:
    """How far cells ``x, y`` of a square are along its Hilbert curve from ``0, 0`` to ``2^bits - 1, 0``."""
    distance = torch.zeros_like(x)
    for bit in reversed(range(bits)):
        half = 1 << bit
        right, top = x & half > 0, y & half > 0
        distance = (distance << 2) + (3 * right.long() ^ top.long())
        x, y = x & (half - 1), y & (half - 1)
        turned = right & ~top
        x, y = torch.where(turned, half - 1 - x, x), torch.where(turned, half - 1 - y, y)
        x, y = torch.where(top, x, y), torch.where(top, y, x)
    return distance


def grid_places(plane: tuple[int, int], device: torch.device) -> Tensor:
    """Row and column of the tokens of a grid, row by row, ``(1, h·w, 2)``, float32."""
    token = torch.arange(plane[0] * plane[1], device=device)
    return torch.stack([token // plane[1], token % plane[1]], dim=-1)[None].float()
