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

**Members in the region** are seen one by one, so each window takes their share out of ``b_C``. The cluster's key and
value stay those of all members.

**Clusters** begin as the cells of a coarse grid (``pooled`` stops there). A step of k-means assigns each key to the
nearest mean and takes means anew, with weights ``w``. A difference of keys matters by what it does to logits, so the
distance is ``sum_ch var(q_ch)·(k_ch - c_ch)²``, on the quarter of the channels where this varies most: a step then
costs an eighth of what attending to the clusters costs, at hardly any loss.

**Cost.** With regions of ``r`` tokens and ``c`` clusters, ``N·(r + c·(1 + steps/8) + prefix)``
products of a query and a key: linear in N, as ``c`` is capped. Where softmax itself is no dearer, it is what runs.

**In blocks.** The columns of a window, near and far, are copied side by side: that is one product, one softmax and one
product for a few windows at a time, as many as a cache holds, and their logits are all that there ever is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from latte_convert.errors import UsageError
from latte_convert.kernels.base import Extras, Kernel, check_mask
from latte_convert.kernels.clustering import BLOCK, Clusters, cell_counts, cluster, cluster_products, moments
from latte_convert.kernels.cost import CallShape, softmax_flops
from latte_convert.kernels.linear import no_autocast
from latte_convert.kernels.near_far_fields import Field, attend, attend_windows, far_bias, stack
from latte_convert.kernels.near_far_windows import Places, Tiling
from latte_convert.kernels.softmax import softmax_attention

if TYPE_CHECKING:
    from latte_convert.adapters.base import TokenLayout


CLUSTERS = 128
"""Most far keys where the options do not say."""
SHARE = 8
"""Tokens for each of them, at least."""


class NearFarKernel(Kernel):
    """``near_far_attention``; has no parameters to fit.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
        window: Side of a window in tokens; on a sequence a window has ``window²``. 0: no near field.
        halo: Tokens around a window that its queries see one by one, too; on a sequence ``halo·window`` on each side.
        far: ``clustered``: k-means on the keys of each head. ``pooled``: cells of the grid.
        clusters: Largest number of far keys, so that the cost is linear in the number of tokens. None: one for 8
            tokens, at most 128.
        steps: Steps of k-means.
        **extras: See ``Extras``. ``exact_prefix`` is always on.
    """

    name = "near_far"
    causal_form = False

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
        **extras: Unpack[Extras],
    ) -> None:
        super().__init__(heads, head_dim, **extras)
        numbers = (window, halo, (1 if clusters is None else clusters) - 1, steps - 1)
        if min(numbers) < 0 or not all(isinstance(x, int) for x in numbers) or far not in ("pooled", "clustered"):
            raise UsageError(
                f"near_far has no window={window}, halo={halo}, far={far!r}, clusters={clusters}, steps={steps}: "
                "window and halo are at least 0, clusters and steps at least 1, far is 'pooled' or 'clustered'"
            )
        self.options |= {"window": window, "halo": halo, "far": far, "clusters": clusters, "steps": steps}
        self.exact_prefix = True
        self.window = window
        self.halo = halo
        self.clusters = clusters
        self.steps = steps if far == "clustered" else 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        causal: bool,
        layout: TokenLayout | None,
    ) -> Tensor:
        """Attend; see ``Kernel.forward``.

        Raises:
            UsageError: The call is causal.
        """
        if causal:
            raise UsageError(
                "near_far has no causal form: its clusters mix past and future; set another `kernel` for this site, "
                "latte for instance"
            )
        prefix, grid, aligned = (layout.prefix, layout.grid, layout.aligned) if layout else (0, None, True)
        shape = CallShape(
            queries=query.shape[2],
            keys=key.shape[2],
            heads=self.heads,
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            prefix=prefix,
            grid=grid,
            aligned=aligned,
        )
        if self._flops(shape) >= softmax_flops(shape):
            return softmax_attention(query, key, value, scale=scale, mask=mask)
        return near_far_attention(
            query,
            key,
            value,
            scale=scale,
            prefix=prefix,
            grid=grid,
            aligned=aligned,
            window=self.window,
            halo=self.halo,
            clusters=self._most(keys=key.shape[2]),
            steps=self.steps,
            mask=mask,
        )

    def attend_flops(self, shape: CallShape) -> int:
        """Assignment, means, near field, far field and prefix keys; or softmax, where that is no more."""
        return min(self._flops(shape), softmax_flops(shape))

    def extra_repr(self) -> str:
        """Settings shown by ``print(model)``."""
        settings = f"window={self.window}, halo={self.halo}, clusters={self.clusters}, steps={self.steps}"
        return f"heads={self.heads}, head_dim={self.head_dim}, {settings}"

    def _most(self, keys: int) -> int:
        """Largest number of clusters of so many keys."""
        return max(min(keys // SHARE, CLUSTERS), 1) if self.clusters is None else self.clusters

    def _flops(self, shape: CallShape) -> int:
        places = Places.of(shape.queries, shape.keys, shape.prefix, shape.grid, shape.aligned)
        if not places.tokens or not shape.queries:
            return softmax_flops(shape)
        rows, columns = cell_counts(places.cells_of, self._most(shape.keys))
        queries, keys = shape.queries, rows * columns + places.prefix
        pairs = 0
        tiling = places.tiling(self.window, self.halo)
        if tiling is not None:
            queries = tiling.number * tiling.window_tokens
            pairs = queries * tiling.region_tokens
        products = cluster_products(shape.queries, places.tokens, rows * columns, self.steps, shape.head_dim)
        return 2 * shape.heads * (products + (pairs + queries * keys) * (shape.head_dim + shape.value_dim))


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
    mask: Tensor | None = None,
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
        halo: Tokens that a region reaches beyond its window; on a sequence ``halo·window``.
        clusters: Largest number of clusters.
        steps: Steps of k-means; 0 leaves the cells of the grid.
        mask: bool ``(B, Nk)``, True where a key may be attended to. The others count in no window, cluster or mean.

    Returns:
        ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key. Everything is float32 inside
        (float64 for float64 inputs), under autocast too. Gradients are those of this function with the clusters'
        members held fixed.

    Raises:
        UsageError: ``mask`` is not a boolean key mask.
    """
    check_mask(mask, key)
    places = Places.of(query.shape[2], key.shape[2], prefix, grid, aligned)
    tiling = places.tiling(window, halo)
    wide = torch.promote_types(query.dtype, torch.float32)

    def parts() -> Iterator[Tensor]:
        for samples, heads in _blocks(key):
            q, k, v = (tokens[samples, heads].to(wide).flatten(0, 1) for tokens in (query, key, value))
            seen = None if mask is None else mask[samples].repeat_interleave(len(q) // len(mask[samples]), dim=0)
            yield from _attend_block(q, k, v, seen, places, tiling, scale=scale, clusters=clusters, steps=steps)

    with no_autocast(query.device.type):
        out = stack(parts(), query.new_empty(query.shape[:3].numel(), value.shape[3]))
    out = out.reshape(*query.shape[:3], value.shape[3])
    return out if mask is None else out.masked_fill(~mask.any(-1)[:, None, None, None], 0)


@torch.no_grad()
def assign_keys(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    prefix: int = 0,
    grid: tuple[int, int] | None = None,
    aligned: bool = True,
    clusters: int = 128,
    steps: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """The cluster of each key behind the prefix, ``(B, H, n)``, int64; arguments as in ``near_far_attention``."""
    places = Places.of(query.shape[2], key.shape[2], prefix, grid, aligned)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k = (tokens.to(wide).flatten(0, 1) for tokens in (query, key))
    seen = None if mask is None else mask.repeat_interleave(key.shape[1], dim=0)
    far = _summarise(q, k, k, seen, places, scale=scale, clusters=clusters, steps=steps)[0]
    return far.assign.reshape(*key.shape[:2], -1)


def _blocks(key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and heads to cluster in one go: on a CPU heads of one sample, about ``2·BLOCK`` numbers of theirs."""
    batch, heads, keys, head_dim = key.shape
    if key.device.type != "cpu" or torch.compiler.is_compiling():
        yield slice(None), slice(None)
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
    places: Places,
    tiling: Tiling | None,
    *,
    scale: float,
    clusters: int,
    steps: int,
) -> Iterable[Tensor]:
    """``near_far_attention`` on ``(G, N, ·)``, heads of some samples, token by token; ``seen`` is bool ``(G, Nk)``."""
    first = places.prefix
    far, centre = _summarise(query, key, value, seen, places, scale=scale, clusters=clusters, steps=steps)
    summary = Field(
        torch.cat([key[:, :first], far.key], dim=1),
        torch.cat([value[:, :first], far.value], dim=1),
        far_bias(far, centre, tiling, seen, first),
    )
    if tiling is None:
        return [attend(query, summary, scale).flatten(0, 1)]
    inner = None if seen is None else seen[:, first:]
    return attend_windows(query, key[:, first:], value[:, first:], inner, summary, tiling, scale)


def _summarise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    places: Places,
    *,
    scale: float,
    clusters: int,
    steps: int,
) -> tuple[Clusters, Tensor]:
    """The clusters of the keys behind the prefix, and the mean query times ``scale``, ``(G, 1, d)``."""
    first = places.prefix
    inner = None if seen is None else seen[:, first:]
    # Padding must not move the mean query.
    mean, spread = moments(query, inner if places.paired else None)
    centre = scale * mean
    far = cluster(
        key[:, first:],
        value[:, first:],
        centre,
        spread,
        grid=places.cells_of,
        clusters=clusters,
        steps=steps,
        seen=inner,
    )
    return far, centre
