"""near_far's causal form by its definition: the keys and clusters that each query sees, one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.common import widen
from reference.near_far import assign_reference, summary


def past_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int,
    clusters: int,
    steps: int,
    channels: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax over the keys of two windows up to the query, and the clusters of older blocks.

    Of the ``m`` windows before those two the oldest ``2^l`` are a block, with the largest ``l`` that fits, and so on
    with the rest. A block has clusters of its keys, expanded around the mean of its queries.

    Args:
        query: ``(B, H, N, d)``.
        key: ``(B, H, N, d)``.
        value: ``(B, H, N, dv)``.
        scale: Factor on the logits.
        window: Tokens of a window.
        clusters: Clusters that a query sees, at most, if there are as many as blocks.
        steps: Steps of k-means.
        channels: Number of channels that distances are taken in.
        mask: bool ``(B, N)``, True where a key may be attended to.

    Returns:
        ``(B, H, N, dv)`` in the dtype of ``query``; zeros where a query sees no key.
    """
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=widen(query).dtype)
    tokens = query.shape[2]
    share = max(1, clusters // max(1, len(blocks_of(tokens - 1, window, ever=tokens))))
    for sample in range(len(query)):
        seen = torch.ones(tokens, dtype=torch.bool) if mask is None else mask[sample]
        for head in range(query.shape[1]):
            q, k, v = (widen(x[sample, head]) for x in (query, key, value))
            for i in range(tokens):
                start = max(i // window - 1, 0) * window
                items = [(scale * q[i] @ k[j], v[j]) for j in range(start, i + 1) if seen[j]]
                for block in blocks_of(i, window):
                    settings = {"scale": scale, "share": share, "steps": steps, "channels": channels}
                    items += _columns(q[i], *(x[block.start : block.stop] for x in (q, k, v, seen)), **settings)
                if items:
                    weights = torch.stack([logit for logit, _ in items]).softmax(0)
                    out[sample, head, i] = weights @ torch.stack([one for _, one in items])
    return out.to(query.dtype)


def blocks_of(token: int, window: int, ever: int | None = None) -> list[range]:
    """The blocks that a query sees, oldest first; with ``ever``, one of each size that any of so many queries sees."""
    far = (token // window if ever is None else -(-ever // window) - 1) - 1
    if ever is not None:
        return [range(window << level) for level in range(max(far, 0).bit_length())]
    blocks, start = [], 0
    while far > 0:
        size = 1 << (far.bit_length() - 1)
        blocks.append(range(start * window, (start + size) * window))
        start, far = start + size, far - size
    return blocks


def _columns(
    asking: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float,
    share: int,
    steps: int,
    channels: int,
) -> list[tuple[Tensor, Tensor]]:
    """Logit and value of each cluster of a block for one query."""
    found = assign_reference(
        q[None, None], k[None, None], scale=scale, cells=(min(share, len(q)), 1), channels=channels, steps=steps,
        mask=seen[None],
    )  # fmt: skip
    centre = scale * q[seen].sum(0) / max(int(seen.sum()), 1)
    insides = [(found[0, 0] == cluster) & seen for cluster in range(share)]
    return [summary(scale * asking, centre, k[inside], v[inside]) for inside in insides if inside.any()]
