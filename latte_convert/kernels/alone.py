"""What a length decides is decided for each sample by its own tokens, whatever stands beside it in a batch.

How many tokens are its own is known when a call is made, not when a graph of it is. So ``torch.compile`` leaves these
functions as they are and compiles what is around them. A graph that is exported or traced holds one length only, the
padded one: there, windows, clusters and blocks, and the choice of softmax, are those of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from latte_convert.attention import AttentionCall, SiteCall

_F = TypeVar("_F", bound=Callable[..., Any])


def _left_as_it_is(function: _F) -> _F:
    compiler: Any = torch.compiler
    found: _F = compiler.disable(function, reason="the lengths of samples are known in a call only")
    return found


@_left_as_it_is
def each_alone(attend: Callable[[AttentionCall], Tensor], call: AttentionCall) -> Tensor:
    """Sample by sample, each on its own tokens: padding, and what else is in the batch, changes nothing."""
    out = []
    for index in range(call.query.shape[0]):
        own, queries = call.sample(index).without_padding()
        rows = call.query.new_zeros(1, *call.query.shape[1:3], call.value.shape[3])
        if own.key.shape[2]:
            rows = rows.index_copy(2, queries, attend(own))
        out.append(rows)
    return torch.cat(out)


@_left_as_it_is
def by_length(attend: Callable[[SiteCall], Tensor], call: SiteCall, least: int) -> Tensor | None:
    """The exact branch for samples with fewer than ``least`` keys of their own, ``attend`` for the others."""
    assert call.mask is not None
    short = call.mask.sum(1) < least
    if bool(short.all()):
        return None
    if not bool(short.any()):
        return attend(call)
    return torch.where(short[:, None, None, None], call.exact(), attend(call))
