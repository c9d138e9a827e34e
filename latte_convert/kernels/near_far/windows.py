"""Where tokens are: windows of a grid, and the regions around them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Tiling:
    """A grid cut into equal windows; the last ones may reach over its edge.

    Windows are numbered row by row. Each has a region: itself and a halo around it, the keys that its queries see one
    by one.

    Attributes:
        grid: ``(h, w)`` of the tokens.
        counts: Number of windows along each side.
        window: ``(h, w)`` of a window.
        halo: Tokens of the halo above and below, left and right.
    """

    grid: tuple[int, int]
    counts: tuple[int, int]
    window: tuple[int, int]
    halo: tuple[int, int]

    @classmethod
    def of(cls, grid: tuple[int, int] | None, tokens: int, window: int, halo: int) -> Tiling:
        """Windows of at most ``window`` tokens along a side, as equal as can be.

        A sequence, ``grid`` None, is a column whose windows and regions hold as many tokens as those of a grid:
        ``window²``, and ``2·halo·(window + halo)`` more on each side.
        """
        around = 2 * halo * (window + halo)
        sides, halos = ((window, window), (halo, halo)) if grid else ((window**2, 1), (around, 0))
        grid = grid or (tokens, 1)
        counts = ceil(grid[0] / sides[0]), ceil(grid[1] / sides[1])
        return cls(
            grid=grid,
            counts=counts,
            window=(ceil(grid[0] / counts[0]), ceil(grid[1] / counts[1])),
            halo=(halos[0] if counts[0] > 1 else 0, halos[1] if counts[1] > 1 else 0),
        )

    @property
    def number(self) -> int:
        """Number of windows."""
        return self.counts[0] * self.counts[1]

    @property
    def window_tokens(self) -> int:
        """Tokens of a window, places over the edge included."""
        return self.window[0] * self.window[1]

    @property
    def region_tokens(self) -> int:
        """Tokens of a region, places over the edge included."""
        return (self.window[0] + 2 * self.halo[0]) * (self.window[1] + 2 * self.halo[1])

    def window_of(self, device: torch.device) -> Tensor:
        """Number of the window that each token lies in, ``(h·w,)``."""
        row = torch.arange(self.grid[0], device=device) // self.window[0]
        column = torch.arange(self.grid[1], device=device) // self.window[1]
        return (row[:, None] * self.counts[1] + column).flatten()

    def windows(self, tokens: Tensor, rows: range | None = None) -> Tensor:
        """``(G, h·w, c)`` to ``(G, *counts, h, w, c)`` of all windows or of some rows, zeros over the edge."""
        return self._spans(tokens, rows or range(self.counts[0]), (0, 0))

    def regions(self, tokens: Tensor, rows: range | None = None) -> Tensor:
        """As ``windows``, with halos: views that overlap."""
        return self._spans(tokens, rows or range(self.counts[0]), self.halo)

    def _spans(self, tokens: Tensor, rows: range, halo: tuple[int, int]) -> Tensor:
        (height, width), (above, left) = self.window, halo
        top, bottom = rows.start * height - above, rows.stop * height + above
        lines = tokens.reshape(len(tokens), *self.grid, tokens.shape[2])[:, max(top, 0) : bottom]
        right = left + self.counts[1] * width - self.grid[1]
        sides = (0, 0, left, right, max(-top, 0), max(bottom - self.grid[0], 0))
        padded = F.pad(lines, sides) if any(sides) else lines
        spans = padded.unfold(1, height + 2 * above, height).unfold(2, width + 2 * left, width)
        return spans.permute(0, 1, 2, 4, 5, 3)

    def merge(self, windows: Tensor, rows: range | None = None) -> Tensor:
        """The inverse of ``windows``, from ``(G·number, h·w, c)``; the tokens of all rows of windows or of some."""
        rows = rows or range(self.counts[0])
        (height, width), channels = self.window, windows.shape[-1]
        split = windows.reshape(-1, len(rows), self.counts[1], height, width, channels)
        padded = split.transpose(2, 3).reshape(len(split), len(rows) * height, self.counts[1] * width, channels)
        return padded[:, : self.grid[0] - rows.start * height, : self.grid[1]].flatten(1, 2)


class Places(NamedTuple):
    """Where the tokens of a call are: a prefix, then a grid or, ``grid`` None, a sequence."""

    prefix: int
    tokens: int
    grid: tuple[int, int] | None
    paired: bool  # query i is key prefix + i

    @classmethod
    def of(cls, queries: int, keys: int, prefix: int, grid: tuple[int, int] | None, aligned: bool) -> Places:
        """If the keys do not fill the grid, they are a sequence."""
        prefix = min(prefix, keys)
        tokens = keys - prefix
        fits = grid is not None and grid[0] * grid[1] == tokens
        return cls(prefix, tokens, grid if fits else None, aligned and queries == tokens)

    @property
    def cells_of(self) -> tuple[int, int]:
        """The grid; that of a sequence is one column."""
        return self.grid or (self.tokens, 1)

    def tiling(self, window: int, halo: int) -> Tiling | None:
        """The windows; None without a near field."""
        return Tiling.of(self.grid, self.tokens, window, halo) if window and self.paired else None
