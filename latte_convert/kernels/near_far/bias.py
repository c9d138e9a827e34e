"""A bias on the logits, such as one of relative positions: as it is of near keys, its mean of those in a cluster.

The model has made a number of it for each query and key before it attends, and each is read once here: the far field
of a biased call takes N² additions, and no second tensor of N² numbers. With the weights ``w_j`` of a cluster, the mean
of the biases ``b_qj`` is to first order what they add to its column::

    sum_{j in C} exp(s<q, k_j> + b_qj)·v_j  ≈  exp(s<q, c> + b_C + sum w_j·b_qj)·v_C
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte_convert.graphs import plain, sizes
from latte_convert.kernels.near_far.clustering import Members, block_size, sums_of
from latte_convert.kernels.near_far.summary import Summary
from latte_convert.kernels.near_far.windows import Tiling


def near_bias(bias: Tensor, tiling: Tiling, rows: range) -> Tensor:
    """``(G, n, n)`` to ``(G, windows, queries, places)`` of some rows of windows; some number over the edge."""
    tokens = torch.arange(bias.shape[2], device=bias.device)[None, :, None]
    query = tiling.windows(tokens, rows).reshape(-1, tiling.window_tokens)
    key = tiling.regions(tokens, rows).reshape(-1, tiling.region_tokens)
    return bias[:, query[:, :, None], key[:, None, :]]


def far_bias(bias: Tensor, summary: Summary, prefix: int) -> Tensor:
    """What far columns get of ``(G, Nq, prefix + n)``: ``(G, Nq, prefix + c)``."""
    mass = summary.mass.masked_fill(summary.mass == 0, 1)
    weight = summary.weight / mass.gather(1, summary.assign)
    members = Members.of(summary.assign, plain(mass.shape[1]))
    heads, queries, keys = sizes(bias)
    strip = max(1, 4 * block_size(bias) // (heads * keys))
    parts = []
    for first in range(0, queries, strip):
        some = bias[:, first : first + strip].to(weight.dtype)
        means = sums_of(some[..., prefix:].mT, weight[:, None], members)[:, 0].mT
        parts.append(torch.cat([some[..., :prefix], means], dim=-1))
    return torch.cat(parts, dim=1)
