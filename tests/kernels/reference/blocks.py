"""blocks by its definition: the keys and blocks that each query sees, one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import widen


def blocks_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    assign: Tensor,
    line: Tensor,
    window: int,
    halo: int,
    opened: int = 0,
    prefix: int = 0,
    mask: Tensor | None = None,
    size: Tensor | None = None,
) -> Tensor:
    """Softmax over the prefix, the keys of the window's region, and the blocks of the other keys.

    The tokens behind the prefix lie along a line that is cut into windows; a region reaches ``halo`` further on both
    sides. With ``q̄`` the mean query of a window, a block, without its members in the region, has for that window's
    queries the key ``c``, the mean of its ``k_j``, and the value that is the mean of its ``v_j``, both weighted with
    ``exp(scale·<q̄, k_j>)``, and its logit is ``scale·<q, c>`` plus the logarithm of the sum of
    ``exp(scale·<q̄, k_j - c>)``. The ``opened`` blocks whose members ``q̄`` attends to most are seen key by key. A key
    counts as often as ``size`` says.

    Args:
        query, key: ``(B, H, prefix + n, d)``.
        value: ``(B, H, prefix + n, dv)``.
        scale: Factor on the logits.
        assign: ``(B, H, n)``: the block of each key behind the prefix.
        line: ``(B, n)``: the tokens behind the prefix in their order on the line.
        window: Tokens of a window; the last may hold fewer.
        halo: Tokens that a region reaches beyond its window.
        opened: Number of blocks that are seen key by key.
        prefix: Number of leading tokens; they are seen by all and attend by softmax.
        mask: bool ``(B, prefix + n)``, True where a key may be attended to and a query enters a mean.
        size: ``(B, prefix + n)``.

    Returns:
        ``(B, H, prefix + n, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=widen(query).dtype)
    for sample in range(len(query)):
        seen = torch.ones(key.shape[2], dtype=torch.bool) if mask is None else mask[sample]
        count = torch.zeros(key.shape[2]) if size is None else size[sample].to(out.dtype).log()
        spans = line[sample].split(window)
        for head in range(query.shape[1]):
            q, k, v = (scale * widen(query[sample, head]), widen(key[sample, head]), widen(value[sample, head]))
            for i in range(prefix):
                if seen.any():
                    out[sample, head, i] = (q[i] @ k[seen].T + count[seen]).softmax(0) @ v[seen]
            for number, own in enumerate(spans):
                first = number * window
                around = line[sample, max(first - halo, 0) : first + window + halo] + prefix
                own = own + prefix
                centre = q[own[seen[own]]].sum(0) / max(int(seen[own].sum()), 1)
                single = [j for j in [*range(prefix), *around.tolist()] if seen[j]]
                columns = [(k[j], v[j], count[j]) for j in single]
                blocks = []
                for block in range(int(assign.max()) + 1):
                    inside = [j + prefix for j in (assign[sample, head] == block).nonzero()[:, 0].tolist()]
                    if left := [j for j in inside if seen[j] and j not in around]:
                        blocks.append((left, k[left] @ centre + count[left]))
                blocks.sort(key=lambda block: float(block[1].detach().logsumexp(0)), reverse=True)
                columns += [(k[j], v[j], count[j]) for left, _ in blocks[:opened] for j in left]
                for left, logits in blocks[opened:]:
                    weights = logits.softmax(0)
                    mean = weights @ k[left]
                    columns.append((mean, weights @ v[left], logits.logsumexp(0) - mean @ centre))
                if columns:
                    keys, values, levels = (torch.stack(x) for x in zip(*columns, strict=True))
                    out[sample, head, own] = (q[own] @ keys.T + levels).softmax(-1) @ values
    return out.to(query.dtype)
