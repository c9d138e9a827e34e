"""Stripes of the exact attention: keys that every query attends to, and queries that attend everywhere.

An attention matrix ``A`` of one head is fitted by ``1 s_cᵀ + s_r 1ᵀ``, rank one each. With rows that sum to one,
least squares gives every query the same ``s_r``, which tells nothing, and peaked rows outweigh all others. So each
row is first scaled to unit length, ``b_i = A_i / ||A_i||``: every query counts alike, and a row stands out by how
flat it is. Over the cells that are not masked, with ``v_i`` visible keys of query ``i`` and ``n_j`` queries that see
key ``j``, the two-way additive fit, rows first, is

    s_r(i) = mean_j b_ij                  row share    = mean_i v_i s_r(i)²  =  mean_i 1 / (v_i ||A_i||²)
    s_c(j) = mean_i (b_ij - s_r(i))       column share = (1 / n) sum_j n_j s_c(j)²

Both are shares of the energy ``sum b_ij²`` = ``n``; what is left of it is in neither, the head's own pattern. Without
a causal mask this is the joint least-squares fit; with one, columns are fitted to what rows leave. The form of the
fit is that of stripe-guided attention; the scaling of the rows, and so the shares, are our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isfinite
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, AttentionSite, SiteCall
from latte_convert.data.feed import Feed, Inputs, JoinedFeed
from latte_convert.progress import Progress, silent

Part = Literal["strength", "column_strength", "row_strength"]
"""What counts as the stripe strength of a site."""

KEY_STRIPE = 3.0
"""A key carries a column stripe where it gets this many times the attention of an even spread."""

QUERY_STRIPE = 0.5
"""A query carries a row stripe where its effective number of keys is at least this share of the keys."""

_CHUNK = 128  # queries whose softmax rows exist at a time


@dataclass(frozen=True)
class StripeToken:
    """A token that carries a stripe.

    Attributes:
        index: Place of the token, from 0; -1 for the last one of a sequence, wherever that is in each sample.
        share: Of a key: mean attention it gets from a query. Of a query: its effective number of keys,
            ``1 / ||A_i||²``, over the number of keys. Means over the samples; 0 in one without such a token.
        prefix: Whether it is a leading token off the grid (CLS, registers).
    """

    index: int
    share: float
    prefix: bool = False

    @property
    def name(self) -> str:
        """How people read it: ``prefix 0``, ``last``, ``411``."""
        return f"prefix {self.index}" if self.prefix else "last" if self.index == -1 else str(self.index)


@dataclass(frozen=True)
class HeadStripes:
    """Stripes of one head, averaged over the samples.

    Attributes:
        column_strength: Share of the energy that ``1 s_cᵀ`` explains, 0 to 1.
        row_strength: Share of the energy that ``s_r 1ᵀ`` explains, 0 to 1; both together are at most 1.
        keys: Keys with a column stripe, strongest first.
        queries: Queries with a row stripe, strongest first.
    """

    column_strength: float
    row_strength: float
    keys: tuple[StripeToken, ...]
    queries: tuple[StripeToken, ...]


@dataclass(frozen=True)
class Stripes:
    """Stripes of one site.

    Attributes:
        heads: One entry per head.
        samples: Number of attention matrices of each head that were looked at.
    """

    heads: tuple[HeadStripes, ...]
    samples: int

    @property
    def column_strength(self) -> float:
        """Mean over the heads."""
        return sum(head.column_strength for head in self.heads) / len(self.heads)

    @property
    def row_strength(self) -> float:
        """Mean over the heads."""
        return sum(head.row_strength for head in self.heads) / len(self.heads)

    @property
    def strength(self) -> float:
        """Share of the energy that rows and columns explain together, mean over the heads."""
        return self.column_strength + self.row_strength


@torch.no_grad()
def stripe_analysis(
    host: Host,
    sites: Sequence[AttentionSite],
    feed: Feed,
    *,
    samples: int = 4,
    top: int = 5,
    progress: Progress = silent,
) -> dict[str, Stripes]:
    """Measure the stripes of every head of sites, from the exact attention on a few samples.

    Softmax rows exist for a chunk of queries at a time. Keys that are masked, queries that are padding and queries
    that see no key take no part.

    Args:
        host: The original; left as it was.
        sites: The sites to look at.
        feed: Calibration inputs.
        samples: How many of them, at most; of a joined feed, that many for each tower.
        top: How many tokens a head names, at most.
        progress: Told of every sample.

    Returns:
        The stripes by site, in order of ``sites``. A site that the samples do not reach, or whose attention is not a
        softmax of masked dot products alone (a bias, say), has none.
    """
    watches = {site.name: _Watch() for site in sites}
    feeds = feed.feeds if isinstance(feed, JoinedFeed) else [feed]
    advance = progress("Looking for stripes", sum(min(samples, len(each)) for each in feeds))
    with host.watch({name: partial(_watch, watch) for name, watch in watches.items()}):
        for inputs in _first(feeds, samples):
            host.run(inputs)
            advance()
    return {name: watch.stripes(top) for name, watch in watches.items() if watch.calls}


def correlation(
    stripes: Mapping[str, Stripes], scores: Mapping[str, float | None], part: Part = "strength"
) -> float | None:
    """Spearman's rank correlation, over the sites, of stripe strength with sensitivity.

    Args:
        stripes: Stripes by site.
        scores: Sensitivity by site; a site without a finite one does not count.
        part: Which strength of a site: of columns, of rows, or of both together.

    Returns:
        -1 to 1, ties sharing their mean rank; None with fewer than 3 sites, or where all of one side are equal.
    """
    known = [(getattr(stripes[name], part), value) for name, value in scores.items() if name in stripes]
    pairs = torch.tensor([pair for pair in known if pair[1] is not None and isfinite(pair[1])], dtype=torch.float64)
    if len(pairs) < 3:
        return None
    columns = pairs.T
    ranks = (columns[:, :, None] > columns[:, None]).double().sum(-1)
    ranks += (columns[:, :, None] == columns[:, None]).double().sum(-1) / 2
    value = float(torch.corrcoef(ranks)[0, 1])
    return value if isfinite(value) else None


def _first(feeds: Sequence[Feed], samples: int) -> Iterator[Inputs]:
    for feed in feeds:
        yield from islice(feed, samples)


def _watch(watch: _Watch, call: SiteCall) -> None:
    if call.obstacle is None:
        for index in range(call.query.shape[0]):
            watch.add(call.sample(index))


class _Watch:
    """Sums over the attention matrices of one site."""

    def __init__(self) -> None:
        self.calls = 0
        self.columns = self.rows = torch.zeros(())
        self.keys, self.queries = _TokenSums(KEY_STRIPE), _TokenSums(QUERY_STRIPE)

    def add(self, call: AttentionCall) -> None:
        """Add the matrices of a call with one sample."""
        fit = _fit(call)
        if fit is None:
            return
        self.calls += 1
        self.columns, self.rows = self.columns + fit.columns, self.rows + fit.rows
        layout, sequence = call.layout, call.layout.grid is None
        self.keys.add(fit.attention, fit.even, layout.prefix, named_last=sequence)
        prefix, sequence = (layout.prefix, sequence) if layout.aligned else (0, False)
        self.queries.add(fit.spread, fit.asking, prefix, named_last=sequence)

    def stripes(self, top: int) -> Stripes:
        """The means."""
        columns, rows = (self.columns / self.calls).tolist(), (self.rows / self.calls).tolist()
        heads = (
            HeadStripes(columns[h], rows[h], self.keys.top(h, top, self.calls), self.queries.top(h, top, self.calls))
            for h in range(len(columns))
        )
        return Stripes(tuple(heads), self.calls)


class _TokenSums:
    """What every token gets, summed over calls whose numbers of tokens may differ.

    Place 0 is kept for the last token of a sequence: it is often one of a kind (SEP, EOS), and seldom in the same
    place of two texts. The token with index ``i`` has place ``i + 1``.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.prefix = 0
        self.values, self.even = torch.zeros(1, 0), torch.zeros(0)

    def add(self, values: Tensor, even: Tensor, prefix: int, *, named_last: bool) -> None:
        """Add the ``(H, N)`` values of a call, and ``(N,)`` those of an even spread: 0 for a token without part."""
        self.prefix = prefix
        places = torch.arange(1, len(even) + 1)
        if named_last:
            places[even.nonzero()[-1]] = 0
        grown = max(len(even) + 1 - len(self.even), 0)
        self.even = F.pad(self.even, (0, grown)).index_add(0, places, even)
        self.values = F.pad(self.values, (0, grown)).expand(len(values), -1).index_add(1, places, values)

    def top(self, head: int, count: int, calls: int) -> tuple[StripeToken, ...]:
        """The tokens of a head that carry stripes, at most ``count`` of them."""
        values = self.values[head]
        carries = (self.even > 0) & (values >= self.threshold * self.even)
        order = [place for place in values.argsort(descending=True, stable=True).tolist() if carries[place]]
        return tuple(
            StripeToken(place - 1, float(values[place]) / calls, prefix=0 < place <= self.prefix)
            for place in order[:count]
        )


@dataclass(frozen=True)
class _Fit:
    """The fit of a call with one sample, on the CPU.

    Attributes:
        columns: ``(H,)`` column share.
        rows: ``(H,)`` row share.
        attention: ``(H, Nk)`` mean attention of the queries.
        even: ``(Nk,)`` the same if every query attended to all keys it sees alike; 0 for a key that none sees.
        spread: ``(H, Nq)`` effective number of keys over the number of keys.
        asking: ``(Nq,)`` 1 where a query takes part, 0 where it is padding or sees no key.
    """

    columns: Tensor
    rows: Tensor
    attention: Tensor
    even: Tensor
    spread: Tensor
    asking: Tensor


def _fit(call: AttentionCall) -> _Fit | None:
    """Fit the matrices of a call with one sample; None where no query sees a key."""
    heads, total = call.key.shape[1:3]
    attention, residual = torch.zeros(2, heads, total, device=call.key.device)
    even, queries = torch.zeros(2, total, device=call.key.device)
    keys, levels = [], []
    for visible, weights in _rows(call):
        number = visible.sum(-1)
        energy = weights.square().sum(-1, keepdim=True)
        unit = weights / energy.sqrt().clamp(min=torch.finfo(energy.dtype).tiny)
        level = unit.sum(-1) / number.clamp(min=1)
        residual += (unit - level[..., None]).mul_(visible).sum(1)
        attention += weights.sum(1)
        even += (visible / number.clamp(min=1)[:, None]).sum(0)
        queries += visible.sum(0)
        keys.append(number)
        levels.append(level)
    number = torch.cat(keys)
    rows = number * torch.cat(levels, dim=-1).square()
    asking = (number > 0).float()
    count = asking.sum()
    if not count:
        return None
    parts = (
        (residual.square() / queries.clamp(min=1)).sum(-1) / count,
        rows.sum(-1) / count,
        attention / count,
        even / count,
        rows * number / (queries > 0).sum(),
        asking,
    )
    return _Fit(*(part.cpu() for part in parts))


def _rows(call: AttentionCall) -> Iterator[tuple[Tensor, Tensor]]:
    """The matrices of a call with one sample, some queries at a time.

    Yields:
        ``(rows, Nk)``, which keys a query sees, none if it is padding; ``(H, rows, Nk)``, its attention to them.
    """
    query, key, device = call.query[0].float(), call.key[0].float(), call.key.device
    count, total = query.shape[1], key.shape[1]
    for start in range(0, count, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, count), device=device)
        visible = torch.ones(len(index), total, dtype=torch.bool, device=device)
        if call.mask is not None:
            visible &= call.mask[0]
            if call.layout.aligned and count == total:
                visible &= call.mask[0, index, None]
        if call.causal:
            visible &= torch.arange(total, device=device) <= index[:, None] + total - count
        logits = call.scale * query[:, index] @ key.transpose(-1, -2)
        if (bias := call.bias_of(slice(start, start + _CHUNK))) is not None:
            logits = logits + bias[0]
        logits = logits.masked_fill(~visible, float("-inf"))
        yield visible, logits.softmax(-1).nan_to_num()  # a query that sees no key attends to nothing
