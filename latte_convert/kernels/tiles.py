"""What the Triton kernels share: rows of tokens as a tile, and how products of tiles are rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte_convert.kernels.device import interpreted

INTERPRETED = tl.constexpr(interpreted())
LEAST = 16
"""Smallest side of a tile that ``tl.dot`` multiplies."""


@triton.jit
def load_rows(start, rows, columns, stride, inside, width):
    """Rows of a matrix with channels side by side as a tile; zeros where a row is not ``inside``."""
    places = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(places, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def product(a, b, added, PRECISION: tl.constexpr):
    """``a @ b + added`` of two tiles of one dtype, in float32."""
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 as whole numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, added, input_precision=PRECISION)


@triton.jit
def store_rows(start, rows, columns, stride, inside, width, tile):
    """The inverse of ``load_rows``."""
    places = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(places, tile.to(start.dtype.element_ty), mask=inside[:, None] & (columns < width)[None, :])


def side(width: int) -> int:
    """Side of the tile that so many channels take."""
    return max(LEAST, int(triton.next_power_of_2(width)))


def block_of(*tokens: Tensor) -> int:
    """Rows of a tile: fewer where products take three passes or heads are wide, so that registers do not run over."""
    return 64 if tokens[0].dtype is not torch.float32 and max(x.shape[-1] for x in tokens) <= 64 else 32


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies float32 tiles: in three passes of TF32, or in one where their tokens are no finer."""
    return "tf32x3" if dtype is torch.float32 else "tf32"


def side_by_side(tokens: Tensor) -> Tensor:
    """The tokens with the channels of each next to each other, as ``load_rows`` takes them."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def empty_like_heads(query: Tensor, width: int) -> Tensor:
    """Room for an output ``(B, H, N, width)``: a view of ``(B, N, H, width)``, as models go on with it."""
    batch, heads, count, _ = query.shape
    return query.new_empty(batch, count, heads, width).transpose(1, 2)
