"""The exact second-order Taylor expansion of softmax: O(N·d³), the yardstick of what LATTE's diagonal leaves out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.graphs import exporting
from latte_convert.kernels.base import Extras, Kernel
from latte_convert.kernels.fitting import GridStage, Stage
from latte_convert.kernels.linear import CAUSAL_CHUNK, divided, no_autocast

# Tokens whose (d+1)(d+2)/2 features exist at a time.
CHUNK = 2 * CAUSAL_CHUNK
ALPHAS = (1.0, 0.75, 0.0, -1.0, -3.0, -8.0, -15.0)
"""Anchors that a fit tries."""


class Taylor2Kernel(Kernel):
    """``Sim_ij = (x_ij + 1 - alpha)² + 1`` with ``x = scale·<q, k>``: ``exp(x)`` to second order around ``alpha``.

    ``exp(x) ≈ e^alpha/2 · [(x + 1 - alpha)² + 1]``; the factor cancels in the division. With
    ``h(x) = [sqrt(scale)·x, sqrt(1 - alpha)]``, ``<h(q), h(k)> = x + 1 - alpha``, and its square is the inner
    product of the Kronecker squares of ``h``. They are symmetric: the products ``h_a·h_b`` with ``a <= b``,
    ``(d+1)(d+2)/2`` of them, are enough where those with ``a < b`` count twice.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        granularity: ``layer``: ``alpha`` of shape ``(1,)``; ``head``: of shape ``(heads,)``; float32, 0 at first.
        **extras: See ``Extras``.
    """

    name = "taylor2"
    causal_form = True
    legend = "alpha is the anchor of the Taylor expansion"

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        granularity: Literal["layer", "head"] = "layer",
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        if granularity not in ("layer", "head"):
            raise ValueError(f"granularity is 'layer' or 'head', not {granularity!r}")
        self.options |= {"granularity": granularity}
        self.alpha = nn.Parameter(torch.zeros(heads if granularity == "head" else 1, dtype=torch.float32))

    def attend(self, call: AttentionCall) -> Tensor:
        """All arithmetic is float32 (float64 for float64 inputs), under autocast too."""
        wide = torch.promote_types(call.query.dtype, torch.float32)
        with no_autocast(call.query.device.type):
            # The slope of the root is infinite at alpha = 1; a floor below float32's resolution keeps it finite.
            root = (1 - self.alpha.to(wide)).clamp_min(1e-12).sqrt().reshape(-1, 1, 1)
            q, k = (_anchored(tokens.to(wide), root, call.scale) for tokens in (call.query, call.key))
            v = F.pad(call.value.to(wide), (0, 1), value=1.0)  # the last column of every product is the divisor
            if call.mask is not None:
                v = v * call.mask[:, None, :, None].to(wide)
            sums = (_causal if call.causal else _bidirectional)(q, k, v)
            return divided(sums).to(call.query.dtype)

    def own_stages(self, weight: Tensor | None, seed: int) -> list[Stage]:
        """The anchor, of the layer or of each head."""
        return [GridStage(self, weight, seed, self.alpha, ALPHAS)]

    @torch.no_grad()
    def scalars(self) -> dict[str, Tensor]:
        """``alpha``."""
        return {"alpha": self.alpha.detach()}

    def attend_flops(self, shape: CallShape) -> int:
        """Features times values and sums; causal also the pairs inside each chunk."""
        columns = shape.value_dim + 1  # the divisor is one more value column of both products
        features = (shape.head_dim + 1) * (shape.head_dim + 2) // 2
        products = (shape.queries + shape.keys) * features * columns
        if shape.causal:
            square = min(shape.queries, shape.keys)
            full, rest = divmod(square, CAUSAL_CHUNK)
            pairs = full * CAUSAL_CHUNK**2 + rest**2
            products = (square + shape.keys) * features * columns + pairs * (shape.head_dim + 1 + columns)
        return 2 * shape.heads * products


def _anchored(tokens: Tensor, root: Tensor, scale: float) -> Tensor:
    """``h`` of the tokens, transposed to ``(B, H, d + 1, N)``: taking features is then copying rows."""
    last = root.expand(*tokens.shape[:-1], 1)
    return torch.cat([scale**0.5 * tokens, last], dim=-1).mT.contiguous()


class _State:
    """``sum_j h(k_j)⊗h(k_j)·v_j`` and ``sum_j v_j`` of the keys so far."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.rows, self.columns = torch.triu_indices(key.shape[-2], key.shape[-2], device=key.device)
        self.times = (1 + (self.rows < self.columns).to(value.dtype))[:, None]
        self.squares = value.new_zeros(*key.shape[:2], len(self.rows), value.shape[-1])
        self.plain = value.new_zeros(*key.shape[:2], 1, value.shape[-1])

    def features(self, anchored: Tensor) -> Tensor:
        """``(B, H, d + 1, n)`` to ``(B, H, (d+1)(d+2)/2, n)``."""
        first, second = (anchored.index_select(-2, index) for index in (self.rows, self.columns))
        return first * second

    def add(self, key: Tensor, value: Tensor) -> None:
        """Take in keys, ``(B, H, d + 1, n)``, and their values."""
        for keys, values in zip(_chunks(key, -1), _chunks(value, -2), strict=True):
            self.squares = self.squares + self.features(keys) @ values
        self.plain = self.plain + value.sum(-2, keepdim=True)

    def read(self, query: Tensor) -> Tensor:
        """Weighted sums for queries, ``(B, H, d + 1, n)`` to ``(B, H, n, dv + 1)``."""
        squares = self.times * self.squares
        return torch.cat([self.features(part).mT @ squares for part in _chunks(query, -1)], dim=-2) + self.plain


def _chunks(tokens: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Tokens whose features exist at a time; in a graph for any number of them, all."""
    return (tokens,) if exporting() else torch.split(tokens, CHUNK, dim)


def _bidirectional(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    state = _State(key, value)
    state.add(key, value)
    return state.read(query)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Pairwise inside a chunk, where the square needs no features; the state of all keys before it."""
    queries, keys = query.shape[-1], key.shape[-1]
    blind = max(queries - keys, 0)  # leading queries that see no key
    past = max(keys - queries, 0)  # leading keys that every query sees
    state = _State(key, value)
    state.add(key[..., :past], value[..., :past, :])
    query, key, value = query[..., blind:], key[..., past:], value[..., past:, :]
    sums = [value.new_zeros(*value.shape[:2], blind, value.shape[-1])]
    for start in range(0, queries - blind, CAUSAL_CHUNK):
        part = slice(start, start + CAUSAL_CHUNK)
        q, k, v = query[..., part], key[..., part], value[..., part, :]
        weights = ((q.mT @ k).square() + 1).tril()
        sums.append(weights @ v + state.read(q))
        state.add(k, v)
    return torch.cat(sums, dim=-2)
