"""Attention maps of converted sites: what softmax attends to, and what the kernel does, on one sample.

Neither matrix is ever stored whole. Tokens are put into at most 64 cells a side. The exact map is summed up over
chunks of queries. The map of a kernel needs no formula of its own: every kernel is linear in the values, so with
the indicator of a cell as a value channel, its output is the attention that this cell gets.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, SiteCall
from latte_convert.data.feed import Inputs
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.map_result import AttentionMap, HeadShares, Heatmap
from latte_convert.measuring.stripes import KEY_STRIPE, QUERY_STRIPE

CELLS = 64
"""Rows and columns of a map, at most."""

_CHUNK = 128  # queries whose softmax rows exist at a time


@dataclass(frozen=True)
class _Cells:
    """How the tokens of one side of a call are put into cells.

    Attributes:
        index: ``(N,)`` cell of every token.
        count: Number of cells.
        prefix: Leading tokens with a cell of their own.
    """

    index: Tensor
    count: int
    prefix: int

    @classmethod
    def over(cls, tokens: int, prefix: int, device: torch.device) -> _Cells:
        prefix = prefix if prefix < min(tokens, CELLS // 2) else 0
        blocks = min(CELLS - prefix, tokens - prefix)
        patches = torch.arange(tokens - prefix, device=device) * blocks // (tokens - prefix) + prefix
        return cls(torch.cat([torch.arange(prefix, device=device), patches]), prefix + blocks, prefix)

    @property
    def members(self) -> Tensor:
        """``(N, cells)``: 1 where a token belongs to a cell."""
        return F.one_hot(self.index, self.count).float()

    @property
    def sizes(self) -> Tensor:
        """``(cells,)``: number of tokens."""
        return self.members.sum(0)


@torch.no_grad()
def attention_maps(
    host: Host,
    kernels: Mapping[str, Kernel],
    inputs: Inputs,
    *,
    min_tokens: int = 0,
    sites: int = 3,
) -> list[AttentionMap]:
    """Maps of a few converted sites on one sample, on the original's inputs of these sites.

    Args:
        host: The original; left as it was.
        kernels: The kernels of the converted sites, in order of the module tree.
        inputs: One call of the model; of a batch, the first sample counts.
        min_tokens: As in the plan: a site with fewer keys runs exact attention, and has no map.
        sites: How many sites, spread evenly over the depth of those that the sample reaches.

    Returns:
        The maps in order of the module tree.
    """
    reached: set[str] = set()

    def converts(call: SiteCall) -> bool:
        return call.obstacle is None and call.key.shape[2] >= min_tokens

    def note(name: str, call: SiteCall) -> None:
        if converts(call):
            reached.add(name)

    with host.watch({name: partial(note, name) for name in kernels}):
        host.run(inputs)
    names = [name for name in kernels if name in reached]
    last = len(names) - 1
    chosen = dict.fromkeys(names[round(last * i / max(sites - 1, 1))] for i in range(sites) if names)
    found: dict[str, AttentionMap] = {}

    def draw(name: str, call: SiteCall) -> None:
        if name not in found and converts(call):
            found[name] = _map(name, kernels[name], call.sample(0))

    with host.watch({name: partial(draw, name) for name in chosen}):
        host.run(inputs)
    return [found[name] for name in chosen]


def _map(name: str, kernel: Kernel, call: AttentionCall) -> AttentionMap:
    device, prefix = call.query.device, call.layout.prefix
    queries = _Cells.over(call.query.shape[2], prefix if call.layout.aligned else 0, device)
    keys = _Cells.over(call.key.shape[2], prefix, device)
    exact = exact_map(call, queries.members, keys.members)
    converted = kernel_map(kernel, call, queries.members, keys.members)
    moved = (exact - converted).abs().sum(-1).mean(-1) / 2
    weights, even = queries.sizes / queries.sizes.sum(), keys.sizes / keys.sizes.sum()
    marks = [[_stripes(map_[head], weights, even) for head in range(len(exact))] for map_ in (exact, converted)]
    head = int(moved.argmax())
    peak = float(torch.maximum(exact[head], converted[head]).max())
    shares = [
        HeadShares(
            exact_columns=of_exact.column_share,
            exact_rows=of_exact.row_share,
            converted_columns=of_converted.column_share,
            converted_rows=of_converted.row_share,
            moved=float(distance),
        )
        for of_exact, of_converted, distance in zip(*marks, moved, strict=True)
    ]
    return AttentionMap(
        site=name,
        kernel=kernel.name,
        queries=call.query.shape[2],
        keys=call.key.shape[2],
        prefix=keys.prefix,
        shape=(queries.count, keys.count),
        heads=shares,
        head=head,
        exact=_heatmap(exact[head], peak, marks[0][head]),
        converted=_heatmap(converted[head], peak, marks[1][head]),
    )


def exact_map(call: AttentionCall, queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax attention of a call with one sample, in cells.

    Args:
        call: The call; its batch size is 1.
        queries: ``(Nq, R)``, 1 where a query belongs to a cell.
        keys: ``(Nk, C)`` likewise.

    Returns:
        ``(H, R, C)``, float32: the share of the attention of a cell's queries that goes to a cell's keys.
    """
    query, key = call.query[0].float(), call.key[0].float()
    count, total = query.shape[1], key.shape[1]
    rows = (queries / queries.sum(0)).T
    out = query.new_zeros(query.shape[0], queries.shape[1], keys.shape[1])
    for start in range(0, count, _CHUNK):
        logits = call.scale * query[:, start : start + _CHUNK] @ key.transpose(-1, -2)
        if (bias := call.bias_of(slice(start, start + _CHUNK))) is not None:
            logits = logits + bias[0]
        if call.mask is not None:
            logits = logits.masked_fill(~call.mask[0], float("-inf"))
        if call.causal:
            last = torch.arange(start, start + logits.shape[1], device=key.device) + total - count
            logits = logits.masked_fill(torch.arange(total, device=key.device) > last[:, None], float("-inf"))
        weights = logits.softmax(-1).nan_to_num()  # a query that sees no key attends to nothing
        out += rows[:, start : start + _CHUNK] @ (weights @ keys)
    return out


def kernel_map(kernel: Kernel, call: AttentionCall, queries: Tensor, keys: Tensor) -> Tensor:
    """The attention that a kernel implies for a call with one sample, in cells; arguments as in ``exact_map``.

    What follows the attention (sigma, bias, output map) is left out. Where a kernel weighs the two halves of the
    value channels differently, this is the mean of both. Rows are divided by their sum, as those of softmax are.
    """
    plain = copy.deepcopy(kernel).to(call.query.device)
    plain.sigma = plain.bias = plain.output_map = None
    width = call.value.shape[3]
    rows = (queries / queries.sum(0)).T
    pieces: list[Tensor] = []
    for piece in torch.split(keys, width, dim=1):
        channels = F.pad(piece, (0, width - piece.shape[1])).to(call.value.dtype)
        halves = []
        for shift in (0, width // 2):
            turned = replace(call, value=channels.roll(shift, -1).expand_as(call.value))
            halves.append(plain(turned)[0].float().roll(-shift, -1))
        pieces.append((rows @ ((halves[0] + halves[1]) / 2))[..., : piece.shape[1]])
    out = torch.cat(pieces, dim=-1).nan_to_num().clamp(min=0)
    return out / out.sum(-1, keepdim=True).clamp(min=torch.finfo(out.dtype).tiny)


@dataclass(frozen=True)
class _Stripes:
    columns: list[int]
    rows: list[int]
    column_share: float
    row_share: float


def _stripes(cells: Tensor, weights: Tensor, even: Tensor) -> _Stripes:
    """The stripes of one map, by the thresholds of ``evaluation.stripes``, as if attention were even within a cell.

    Args:
        cells: ``(R, C)`` attention of cells.
        weights: ``(R,)`` share of the queries in each cell.
        even: ``(C,)`` share of the keys in each cell: what a query gives a cell that attends everywhere alike.
    """
    mass = weights @ cells
    effective = 1 / (cells.square() / even).sum(-1)  # number of keys of a query, over that of all keys
    columns = mass >= KEY_STRIPE * even
    rows = (effective >= QUERY_STRIPE) & (cells.sum(-1) > 0)
    return _Stripes(
        columns=columns.nonzero().flatten().tolist(),
        rows=rows.nonzero().flatten().tolist(),
        column_share=float(mass[columns].sum()),
        row_share=float(weights @ cells.sum(-1).mul(rows)),
    )


def _heatmap(cells: Tensor, peak: float, stripes: _Stripes) -> Heatmap:
    levels = (255 * (cells / max(peak, torch.finfo(cells.dtype).tiny)).sqrt()).round().clamp(0, 255)
    return Heatmap(
        levels=base64.b64encode(bytes(levels.flatten().int().tolist())).decode("ascii"),
        peak=peak,
        columns=stripes.columns,
        rows=stripes.rows,
    )
