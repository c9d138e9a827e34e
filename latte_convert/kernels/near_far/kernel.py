"""near_far: softmax attention that sees nearby keys and the prefix one by one, and the rest in clusters.

A query sees three kinds of columns under *one* softmax:

* the **prefix** (CLS, registers), exactly: key by key;
* the **near field**, exactly: the keys of its region. The grid is cut into windows, and a window with a halo
  around it is the region of all its queries, so that they share one block of keys;
* the **far field**, approximately: one column for each cluster ``C`` of keys, less the members in the region.

Queries of the prefix are few and attend by softmax. So everything is exact but the far field of grid queries.

**A cluster's column.** What is wanted is ``sum_{j in C} exp(s<q, k_j>)·v_j`` for all queries ``q`` at once. Attention
of real models has queries far from zero and near to each other, so expand around their mean ``q̄``, not around 0.
With the weights ``w_j = exp(s<q̄, k_j>)``, normalised inside the cluster, put ``c = sum w_j·k_j`` and
``v_C = sum w_j·v_j``. To first order in ``q - q̄``::

    sum_{j in C} exp(s<q, k_j>)·v_j  ≈  exp(s<q, c> + b_C)·v_C,     b_C = log sum_{j in C} exp(s<q̄, k_j - c>)

For the mean query this is exact whatever the clusters. With ``q̄ = 0`` it is the mean key, the mean value and a bias
of ``log |C|``: the plain recipe of pooled attention, which has nearly twice the error on DINOv2 at the same cost. Like
softmax, the column does not change when a constant is added to all keys.

**Views.** What a cluster shows can depend on who looks: queries are divided into ``views`` groups of equal size, and
each group has its own ``q̄``, and so its own ``c``, ``v_C`` and ``b_C`` of the same clusters. A third less error with 8
of them on DINOv2, for 2% of the FLOPs of softmax at 785 tokens; but sums of keys and the sorting of queries take more
time than their FLOPs say, and on a CPU more clusters buy as much. A group is cut in two at the median along the
direction in which its queries differ most, again and again: equal groups attend in one batched product.

**Members in the region** are seen one by one, so each window takes their share of the cluster's mass, as the mean of
all queries sees it, out of ``b_C``. The cluster's key and value stay those of all members.

**Clusters** begin as the cells of a coarse grid (``pooled`` stops there). A step of k-means assigns each key to the
nearest mean and takes means anew, with weights ``w``. A difference of keys matters by what it does to logits, so the
distance is ``sum_ch var(q_ch)·(k_ch - c_ch)²``, on the quarter of the channels where this varies most: a step then
costs an eighth of what attending to the clusters costs, at hardly any loss.

**A bias on the logits** (relative positions) is added key by key in the near field and in the prefix, and as the
weighted mean of its members to a cluster; see ``bias``.

**Cost.** With regions of ``r`` tokens and ``c`` clusters, ``N·(r + c·(1 + steps/8) + prefix + 1.5·views)``
products of a query and a key: linear in N, as ``c`` is capped; a bias is N² numbers, which
the model makes itself and of which each is added to a mean once. Where softmax itself is no dearer, it is what runs.

**One softmax.** With one view the columns of a window, near and far, are copied side by side, a few windows at a time:
one product and one softmax see them all. With more, the near field is attended to by window and the far field by view,
each with the logarithm of its denominators; these say how the two outputs are mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.errors import UsageError
from latte_convert.graphs import exporting, plain, recorded, sizes
from latte_convert.kernels.base import Extras, Kernel, check_whole
from latte_convert.kernels.device import runs_in_triton
from latte_convert.kernels.linear import no_autocast
from latte_convert.kernels.near_far.bias import far_bias
from latte_convert.kernels.near_far.clustering import BLOCK, cell_counts
from latte_convert.kernels.near_far.fields import Bias, attend_far, attend_near, attend_together, far_columns, merge
from latte_convert.kernels.near_far.past import Past, attend_past
from latte_convert.kernels.near_far.summary import summarise, summary_products, view_size
from latte_convert.kernels.near_far.whole import attend_whole
from latte_convert.kernels.near_far.windows import Places, Tiling
from latte_convert.kernels.softmax import softmax_attention, softmax_flops

CLUSTERS = 128
"""Most far keys where the options do not say."""
SHARE = 8
"""Tokens for each of them, at least."""


class NearFarKernel(Kernel):
    """``near_far_attention``, without parameters to fit; not causal, as clusters mix past and future.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        window: Side of a window in tokens; on a sequence a window has ``window²``. 0: no near field.
        halo: Tokens around a window that its queries see one by one, too; on a sequence
            ``2·halo·(window + halo)`` on each side, which makes regions as large as those of a grid.
        far: ``clustered``: k-means on the keys of each head. ``pooled``: cells of the grid.
        clusters: Largest number of far keys, so that the cost is linear in the number of tokens. None: one for 8
            tokens, at most 128.
        steps: Steps of k-means.
        views: Groups of queries that see clusters in their own way: 1, 2, 4, 8, ...
        **extras: See ``Extras``. ``exact_prefix`` is always on.
    """

    name = "near_far"
    causal_form = False
    mixes_queries = True
    takes_bias = True

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        window: int = 8,
        halo: int = 2,
        far: Literal["pooled", "clustered"] = "clustered",
        clusters: int | None = None,
        steps: int = 1,
        views: int = 1,
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        bounds = {
            "window": (window, 0, 1024),
            "halo": (halo, 0, 1024),
            "clusters": (1 if clusters is None else clusters, 1, 1 << 16),
            "steps": (steps, 1, 100),
            "views": (views, 1, 1024),
        }
        check_whole("near_far", bounds)
        if views & (views - 1) or far not in ("pooled", "clustered"):
            raise UsageError(
                f"near_far has no far={far!r}, views={views}: views is 1, 2, 4, 8 and so on, far is 'pooled' or "
                "'clustered'"
            )
        sizes = {"window": window, "halo": halo, "clusters": clusters, "steps": steps, "views": views}
        self.options |= {"far": far, **sizes}
        self.exact_prefix = True
        self.window = window
        self.halo = halo
        self.clusters = clusters
        self.steps = steps if far == "clustered" else 0
        self.views = views

    def attend(self, call: AttentionCall) -> Tensor:
        """``near_far_attention``, or softmax where that is no dearer."""
        if self.is_softmax(call.shape):
            return softmax_attention(call)
        return near_far_attention(
            call.query,
            call.key,
            call.value,
            scale=call.scale,
            prefix=call.layout.prefix,
            grid=call.layout.plane,
            aligned=call.layout.aligned,
            window=self.window,
            halo=self.halo,
            clusters=self._most(call.shape.keys),
            steps=self.steps,
            views=self.views,
            mask=call.mask,
            bias=call.bias,
        )

    def is_softmax(self, shape: CallShape) -> bool:
        """Whether windows and clusters would need no fewer FLOPs than softmax."""
        return self._flops(shape) >= softmax_flops(shape)

    def attend_flops(self, shape: CallShape) -> int:
        """Assignment, means, near field, far field and prefix keys; or softmax, where that is no more.

        Sums of means count, too, though they are no matmuls.
        """
        return min(self._flops(shape), softmax_flops(shape))

    def _most(self, keys: int) -> int:
        """Largest number of clusters of so many keys."""
        return max(min(keys // SHARE, CLUSTERS), 1) if self.clusters is None else self.clusters

    def _flops(self, shape: CallShape) -> int:
        layout = shape.layout
        places = Places.of(shape.queries, shape.keys, layout.prefix, layout.plane, layout.aligned)
        if not places.tokens or not shape.queries:
            return softmax_flops(shape)
        rows, columns = cell_counts(places.cells_of, self._most(shape.keys))
        count = rows * columns
        products = summary_products(
            shape.queries,
            places.tokens,
            count,
            steps=self.steps,
            views=self.views,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
        )
        asked = view_size(shape.queries, self.views) * self.views
        pairs, tiling = 0, places.tiling(self.window, self.halo)
        if tiling is not None:
            padded = tiling.number * tiling.window_tokens
            asked, pairs = (padded if self.views == 1 else asked), padded * tiling.region_tokens
        pairs += asked * (count + places.prefix)
        products += shape.queries * places.tokens * shape.biased
        return 2 * shape.heads * (products + pairs * (shape.head_dim + shape.value_dim))


def near_far_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    prefix: int = 0,
    grid: tuple[int, int] | None = None,
    aligned: bool = True,
    window: int = 8,
    halo: int = 2,
    clusters: int = 128,
    steps: int = 1,
    views: int = 1,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention with clusters in the place of distant keys; the module's docstring has the formulas.

    Args:
        query: ``(B, H, Nq, d)``, any floating dtype: the queries behind the prefix.
        key: ``(B, H, Nk, d)``: ``prefix`` keys that every query sees, then the keys of the grid, row by row.
        value: ``(B, H, Nk, dv)``.
        scale: The module's own scaling of the logits.
        prefix: Number of tokens before the grid; ``Nk`` at most.
        grid: ``(h, w)`` of the keys behind the prefix. None, or one that they do not fill: a sequence.
        aligned: Whether query ``i`` and key ``prefix + i`` are the same token. If not, or if their numbers differ,
            there is no near field.
        window: Side of a window; a sequence has windows of ``window²``. 0: no near field.
        halo: Tokens that a region reaches beyond its window; on a sequence ``2·halo·(window + halo)``.
        clusters: Largest number of clusters.
        steps: Steps of k-means; 0 leaves the cells of the grid.
        views: Groups of queries that see clusters in their own way; a power of two.
        mask: bool ``(B, Nk)``, True where a key may be attended to. The others count in no window, cluster or mean.
        causal: Query ``i`` sees the keys up to ``i``, see ``past``; there are as many queries as keys. All tokens are
            one sequence: neither prefix, grid, halo nor views matter.
        bias: Added to the logits; broadcast to ``(B, H, Nq, Nk)``. A cluster has its mean over the members.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key. Everything is float32 inside
        (float64 for float64 inputs), under autocast too. Gradients are those of this function with the clusters'
        members held fixed.

    Raises:
        UsageError: ``mask`` is not a boolean key mask, ``bias`` does not fit, or ``views`` is no power of two.
    """
    call = AttentionCall(query, key, value, scale, mask, bias=bias)
    if views < 1 or views & (views - 1):
        raise UsageError(f"views={views}: queries are divided into 1, 2, 4, 8 views and so on")
    places = Places.of(plain(query.shape[2]), plain(key.shape[2]), prefix, grid, aligned)
    if not places.tokens or not query.shape[2]:  # nothing is far
        return softmax_attention(call)
    tiling = places.tiling(window, halo)
    wide = torch.promote_types(query.dtype, torch.float32)
    settings = {"clusters": clusters, "steps": steps, "views": views}
    past = Past.of(window, clusters, steps) if causal else None

    def parts() -> Iterator[Tensor]:
        for samples, heads in _blocks(key, one_by_one=bias is not None):
            q, k, v = (tokens[samples, heads].to(wide).flatten(0, 1) for tokens in (query, key, value))
            seen = None if mask is None else mask[samples].repeat_interleave(len(q) // len(mask[samples]), dim=0)
            if past is not None:
                yield attend_past(q, k, v, seen, scale, past).flatten(0, 1)
                continue
            own = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])[samples, heads][0]
            yield from _attend_block(q, k, v, seen, own, places, tiling, scale, **settings)

    with no_autocast(query.device.type):
        if views == 1 and past is None and bias is None and runs_in_triton(call):
            from latte_convert.kernels.near_far import triton  # it imports Triton

            with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
                out = triton.attend(
                    query, key, value, mask, places, tiling, scale=scale, clusters=clusters, steps=steps
                )
        elif exporting():
            q, k, v = (tokens.to(wide).flatten(0, 1) for tokens in (query, key, value))
            seen = None if mask is None else mask[:, None].expand(-1, key.shape[1], -1).flatten(0, 1)
            if past is not None:
                whole = attend_past(q, k, v, seen, scale, past)
            else:
                whole = attend_whole(q, k, v, seen, bias, places, tiling, scale, heads=key.shape[1], **settings)
            out = whole.to(query.dtype)
        else:
            out = _stack(parts(), query.new_empty(query.shape[:3].numel(), value.shape[3]))
    out = out.reshape(*query.shape[:3], value.shape[3])
    return out if mask is None else out.masked_fill(~mask.any(-1)[:, None, None, None], 0)


def _blocks(key: Tensor, *, one_by_one: bool) -> Iterator[tuple[slice, slice]]:
    """Samples and heads to cluster in one go: on a CPU heads of one sample, about ``2·BLOCK`` numbers of theirs."""
    batch, heads, keys, head_dim = sizes(key)
    if key.device.type != "cpu" or torch.compiler.is_compiling():
        yield from ((slice(i, i + 1), slice(None)) for i in range(batch)) if one_by_one else [(slice(None),) * 2]
        return
    size = ceil(heads / max(1, round(heads * keys * head_dim / (2 * BLOCK))))
    for sample in range(batch):
        for first in range(0, heads, size):
            yield slice(sample, sample + 1), slice(first, first + size)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    places: Places,
    tiling: Tiling | None,
    scale: float,
    **settings: int,
) -> Iterable[Tensor]:
    """``near_far_attention`` on ``(G, N, ·)``, heads of some samples, token by token.

    ``seen`` is bool ``(G, Nk)``, and ``bias`` ``(G, Nq, Nk)``.
    """
    first = places.prefix
    keys, values, inner = key[:, first:], value[:, first:], None if seen is None else seen[:, first:]
    summary = summarise(query, keys, values, places, scale=scale, seen=inner, **settings)
    alone = None if seen is None else seen[:, :first]
    columns = far_columns(summary, key[:, :first], value[:, :first], alone, tiling)
    added = None if bias is None else Bias(bias[..., first:], far_bias(bias, summary, first))
    if tiling is not None and settings["views"] == 1:
        return attend_together(query, keys, values, inner, tiling, scale, columns, added)
    far = attend_far(summary, columns, tiling, plain(query.shape[1]), scale, None if added is None else added.far)
    near = None if tiling is None else attend_near(query, keys, values, inner, tiling, scale, added)
    return [(far.out if near is None else merge(near, far)).flatten(0, 1)]


def _stack(parts: Iterable[Tensor], out: Tensor) -> Tensor:
    """All parts in one tensor, ``out`` without gradients: then no part lives longer than the next one takes."""
    if recorded():
        return torch.cat(list(parts)).to(out.dtype)
    first = 0
    for part in parts:
        out[first : first + len(part)] = part
        first += len(part)
    return out
