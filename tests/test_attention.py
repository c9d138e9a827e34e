"""What an attention call is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from latte_convert.attention import AttentionCall
from latte_convert.errors import UsageError


@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 9), torch.ones(2, 8, dtype=torch.bool), torch.ones(2, 1, 9, 9, dtype=torch.bool)]
)
def test_anything_but_a_boolean_key_mask_is_refused(mask: Tensor) -> None:
    tokens = torch.randn(2, 3, 9, 4)
    with pytest.raises(UsageError, match=r"torch\.bool of shape \(2, 9\).*additive mask"):
        AttentionCall(tokens, tokens, tokens, scale=0.5, mask=mask)


def test_what_the_mask_hides_is_zero_and_the_rest_stays() -> None:
    tokens, mask = torch.randn(2, 3, 9, 4), torch.rand(2, 9) > 0.5
    call = AttentionCall(tokens, tokens, tokens.masked_fill(~mask[:, None, :, None], float("nan")), 0.5, mask)
    shown = torch.where(mask[:, None, :, None], tokens, torch.zeros(()))
    assert torch.equal(call.masked().value, shown)
    assert torch.equal(call.masked().key, shown)
    assert torch.equal(call.masked().query, tokens)
