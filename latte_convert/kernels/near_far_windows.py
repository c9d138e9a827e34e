"""Where tokens are: windows of a grid, and the regions around them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Tiling:
    """A grid cut into equal windows; the last ones may reach over its edge.

    Windows are numbered down the columns. Each has a region: itself and a halo around it, the keys that its queries
    see one by one.

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

        A sequence, ``grid`` None, is a column whose windows hold ``window²`` tokens, as many as those of a grid, and
        have halos of ``halo·window``.
        """
        sides, halos = ((window, window), (halo, halo)) if grid else ((window**2, 1), (halo * window, 0))
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
        return self._region[0] * self._region[1]

    @property
    def _region(self) -> tuple[int, int]:
        return self.window[0] + 2 * self.halo[0], self.window[1] + 2 * self.halo[1]

    @property
    def _missing(self) -> tuple[int, int]:
        """Rows and columns by which the windows reach over the edge."""
        return self.counts[0] * self.window[0] - self.grid[0], self.counts[1] * self.window[1] - self.grid[1]

    def windows(self, tokens: Tensor) -> Tensor:
        """``(G, h·w, c)`` to ``(G, windows, window tokens, c)``, zeros over the edge."""
        heads, _, channels = tokens.shape
        below, right = self._missing
        padded = F.pad(tokens.reshape(heads, *self.grid, channels), (0, 0, 0, right, 0, below))
        cut = padded.reshape(heads, self.counts[0], self.window[0], self.counts[1], self.window[1], channels)
        return cut.permute(0, 3, 1, 2, 4, 5).reshape(heads, self.number, self.window_tokens, channels)

    def merge(self, windows: Tensor) -> Tensor:
        """The inverse of ``windows``."""
        heads, channels = windows.shape[0], windows.shape[-1]
        cut = windows.reshape(heads, self.counts[1], self.counts[0], *self.window, channels)
        padded = cut.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)
        return padded[:, : self.grid[0], : self.grid[1]].flatten(1, 2)

    def regions(self, tokens: Tensor) -> Tensor:
        """``(G, h·w, c)`` to ``(G·columns, rows, region tokens, c)``, zeros over the edge.

        Columns of windows with their halos are copied; the regions of a column are overlapping views of that copy.
        """
        heads, _, channels = tokens.shape
        (above, left), (below, right) = self.halo, self._missing
        sides = (0, 0, left, left + right, above, above + below)
        padded = F.pad(tokens.reshape(heads, *self.grid, channels), sides)
        height, width = self._region
        columns = padded.unfold(2, width, self.window[1]).permute(0, 2, 1, 4, 3)  # (G, columns, rows, width, c)
        columns = columns.reshape(heads * self.counts[1], -1, channels)
        return columns.unfold(1, height * width, self.window[0] * width).mT


class Places(NamedTuple):
    """Where the tokens of a call are: a prefix, then a grid or, ``grid`` None, a sequence."""

    prefix: int
    tokens: int
    grid: tuple[int, int] | None
    paired: bool  # query i is key prefix + i

    @classmethod
    def of(cls, queries: int, keys: int, prefix: int, grid: tuple[int, int] | None, aligned: bool) -> Places:
        """A grid that the keys do not fill is none."""
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
