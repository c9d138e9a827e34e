"""What an adapter tells the rest of the package about a library's attention modules.

An adapter knows three things about a library: where the attention modules are (``sites``), how to take over
one of them (``route``), and which layer reads its output (``output_projection``). It knows nothing about
kernels: a handler decides what a routed module computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from typing_extensions import Self

from latte_convert.errors import UsageError
from latte_convert.graphs import sizes

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of one attention call are arranged.

    Attributes:
        prefix: Number of leading tokens that are not on the grid (CLS, registers).
        grid: ``(height, width)`` of the remaining keys, ``(frames, height, width)`` of a video, or None for a sequence.
        aligned: Whether query ``i`` and key ``i`` are the same token (self-attention).
    """

    prefix: int = 0
    grid: tuple[int, ...] | None = None
    aligned: bool = True

    def __str__(self) -> str:
        """Such as ``37 x 37 + 1 prefix``, ``8 x 14 x 14`` or ``sequence``."""
        tokens = "sequence" if self.grid is None else " x ".join(map(str, self.grid))
        return f"{tokens} + {self.prefix} prefix" if self.prefix else tokens

    @property
    def plane(self) -> tuple[int, int] | None:
        """Height and width of the grid, for kernels of two dimensions: the frames of a video one below the other."""
        return None if self.grid is None else (prod(self.grid[:-1]), self.grid[-1])


def _sequence() -> TokenLayout:
    """Default of a field: torch.compile follows a function, but no instance and no class."""
    return TokenLayout()


@dataclass(frozen=True)
class AttentionSite:
    """One attention module that is, or could be, converted.

    Attributes:
        name: Dotted path of the module inside the model.
        tower: ``vision``, ``text``, ``audio``, ``encoder`` or ``decoder``.
        kind: ``self`` or ``cross``.
        causal: Whether a query sees only the keys up to its own position.
        heads: Number of heads.
        head_dim: Channels per head of query and key.
        eligible: Whether the site can be converted.
        reason: Why it cannot, or None.
        value_dim: Channels per head of value; None where they are as many.
        layout: How the tokens of its first call lay; None where no call has been seen.
        biased: Whether something is added to its logits, such as a bias of relative positions.
    """

    name: str
    tower: str
    kind: Literal["self", "cross"]
    causal: bool
    heads: int
    head_dim: int
    eligible: bool = True
    reason: str | None = None
    value_dim: int | None = None
    layout: TokenLayout | None = None
    biased: bool = False

    @property
    def widths(self) -> dict[str, Any]:
        """What the constructor of a kernel takes where value is not as wide as query and key."""
        return {} if self.value_dim is None else {"value_dim": self.value_dim}


@dataclass(frozen=True)
class CallShape:
    """What a kernel's FLOPs depend on; one sample.

    Attributes:
        queries: Number of query tokens, Nq.
        keys: Number of key tokens, Nk.
        heads: Number of heads, H.
        head_dim: Channels per head of query and key, d.
        value_dim: Channels per head of value, dv.
        causal: Whether a query sees only the keys up to its own position.
        layout: How the tokens are arranged.
        biased: Whether something is added to the logits.
    """

    queries: int
    keys: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool = False
    layout: TokenLayout = field(default_factory=_sequence)
    biased: bool = False


@dataclass(frozen=True)
class Merged:
    """What the tokens of a call stand for where alike tokens have become one.

    Attributes:
        size: float32 ``(B, N)``: how many of the model's tokens each is the mean of; as a key it counts so often.
        places: float32 ``(B, N - prefix, 2)``: mean row and column of those, on the model's own grid.
    """

    size: Tensor
    places: Tensor


@dataclass(frozen=True)
class AttentionCall:
    """What attention is computed from; a kernel takes nothing else.

    Attributes:
        query: ``(B, H, Nq, d)`` after projection, QK-norm and rotary embedding.
        key: ``(B, H, Nk, d)``.
        value: ``(B, H, Nk, dv)``.
        scale: Factor on the logits, often ``d**-0.5``.
        mask: Boolean key mask ``(B, Nk)``, True where a key takes part; None if all do.
        causal: Whether query i sees only the keys up to ``i + Nk - Nq``.
        layout: How the tokens are arranged.
        merged: What the tokens stand for, where alike ones have been merged; None where each is one of the model's.
        bias: Added to the logits, such as one of relative positions; finite, and broadcast to ``(B, H, Nq, Nk)``. These
            N² numbers are the model's own: it has made them before it attends.

    Raises:
        UsageError: The mask is not a boolean key mask: an additive one would be misread. Or the bias does not fit.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    layout: TokenLayout = field(default_factory=_sequence)
    merged: Merged | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bias is not None:
            whole = (*self.query.shape[:3], self.key.shape[2])
            if self.bias.dim() != 4 or any(size not in (1, n) for size, n in zip(self.bias.shape, whole, strict=True)):
                raise UsageError(f"bias is of shape {tuple(self.bias.shape)}, which is not broadcast to {whole}")
        if self.mask is None:
            return
        expected = (self.key.shape[0], self.key.shape[2])
        if self.mask.dtype is not torch.bool or tuple(self.mask.shape) != expected:
            raise UsageError(
                f"mask is {self.mask.dtype} of shape {tuple(self.mask.shape)}; a kernel takes torch.bool of shape "
                f"{expected} (batch, keys), True = attend: turn an additive mask into `mask == 0` first"
            )

    @property
    def shape(self) -> CallShape:
        """What the cost of this call depends on."""
        _, heads, queries, head_dim = sizes(self.query)
        _, _, keys, value_dim = sizes(self.value)
        return CallShape(
            queries=queries,
            keys=keys,
            heads=heads,
            head_dim=head_dim,
            value_dim=value_dim,
            causal=self.causal,
            layout=self.layout,
            biased=self.bias is not None,
        )

    def masked(self) -> Self:
        """The same call with zeros in the place of keys and values that the mask hides: a NaN there cannot leak."""
        if self.mask is None:
            return self
        hidden = ~self.mask[:, None, :, None]
        return replace(self, key=self.key.masked_fill(hidden, 0), value=self.value.masked_fill(hidden, 0))

    def asked(self, queries: slice) -> Self:
        """The same call for some of its queries."""
        return replace(self, query=self.query[:, :, queries], bias=self.bias_of(queries))

    def bias_of(self, queries: slice) -> Tensor | None:
        """The bias of some queries, which may be the same for all of them."""
        return self.bias if self.bias is None or self.bias.shape[2] == 1 else self.bias[:, :, queries]

    def without_padding(self) -> tuple[Self, Tensor]:
        """A call of one sample without the masked tokens around its own, as if it had never been padded.

        Of a sequence what stands before the first and behind the last visible key goes, of a grid the rows and
        columns around the visible ones; in self-attention their queries go with them. What is masked inside stays.

        Returns:
            The call, and the places of its queries in this one.
        """
        assert self.mask is not None
        first, grid = min(self.layout.prefix, self.key.shape[2]), self.layout.plane
        seen = self.mask[0, first:]
        if grid is not None and grid[0] * grid[1] == len(seen):
            rows, columns = (seen.reshape(grid).any(side).nonzero()[:, 0] for side in (1, 0))
            if len(rows):
                rows, columns = (torch.arange(int(i[0]), int(i[-1]) + 1, device=i.device) for i in (rows, columns))
            own = (rows[:, None] * grid[1] + columns).flatten()
            grid = (len(rows), len(columns))
        else:
            own = seen.nonzero()[:, 0]
            if len(own):
                own = torch.arange(int(own[0]), int(own[-1]) + 1, device=own.device)
        keys = torch.cat([torch.arange(first, device=own.device), own + first])
        queries = torch.arange(self.query.shape[2], device=own.device)
        if self.layout.aligned and len(queries) == self.key.shape[2]:
            queries = keys
        mask = self.mask[:, keys]
        return replace(
            self,
            query=self.query[:, :, queries],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            mask=None if bool(mask.all()) else mask,
            layout=replace(self.layout, grid=grid),
            bias=None if self.bias is None else _picked(_picked(self.bias, queries, 2), keys, 3),
        ), queries

    def longest(self) -> Self:
        """The call of the sample with the most keys, without padding; where there is no mask, all are as long."""
        if self.mask is None:
            return self
        return self.sample(int(self.mask.sum(1).argmax())).without_padding()[0]

    def sample(self, index: int) -> Self:
        """The same call for one sample of the batch, as a batch of one."""
        one = slice(index, index + 1)
        return replace(
            self,
            query=self.query[one],
            key=self.key[one],
            value=self.value[one],
            mask=None if self.mask is None else self.mask[one],
            merged=None if self.merged is None else Merged(self.merged.size[one], self.merged.places[one]),
            bias=self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[one],
        )


def _picked(bias: Tensor, places: Tensor, dim: int) -> Tensor:
    """A bias at some places along one side, which it may have the same values for; a view where they are in a row."""
    if bias.shape[dim] == 1 or not len(places):
        return bias
    first, last = int(places[0]), int(places[-1])
    in_a_row = last - first + 1 == len(places)
    return bias.narrow(dim, first, len(places)) if in_a_row else bias.index_select(dim, places)


@dataclass(frozen=True, kw_only=True)
class SiteCall(AttentionCall):
    """A call of a site that an adapter hands over.

    Attributes:
        module: The module of the site.
        exact: Computes the original attention output ``(B, H, Nq, dv)``.
        obstacle: What this call asks for that no linear kernel honours, or None.
        dropout: Dropout of attention weights that the original would apply now.
    """

    module: nn.Module
    exact: Callable[[], Tensor]
    obstacle: str | None = None
    dropout: float = 0.0


Handler = Callable[[SiteCall], "Tensor | None"]
"""Computes what a routed module puts out, ``(B, H, Nq, dv)``; None leaves the call to the original."""


class Adapter(Protocol):
    """One library's way of doing attention."""

    name: str

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """All attention modules in order of the module tree, the ones that cannot be converted included."""

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of a site to ``handler``; returns a function that puts the original back."""

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that reads the attention output, or None where it cannot be told."""
