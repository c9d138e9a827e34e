"""The small models under test hold numbers everywhere: none leaves a parameter to what memory happens to hold."""

from __future__ import annotations

from collections.abc import Callable

import open_clip_models
import pytest
import timm_models
import tiny_models
import torch
from torch import nn

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    **{f"transformers {name}": (lambda name=name: tiny_models.build(name)) for name in tiny_models.BY_NAME},
    **{f"timm {name}": (lambda name=name: timm_models.build(name)) for name in timm_models.MODELS},
    **{f"open_clip {name}": (lambda name=name: open_clip_models.build(name)) for name in open_clip_models.MODELS},
}


def test_fresh_memory_holds_nan() -> None:
    """Otherwise the next test would pass on a lucky day."""
    assert torch.empty(3, 4).isnan().all()
    assert torch.ones(2).new_empty(5).isnan().all()


@pytest.mark.parametrize("name", BUILDERS)
def test_every_parameter_and_buffer_is_initialised(name: str) -> None:
    tensors = dict(BUILDERS[name]().state_dict())
    assert tensors
    bad = [key for key, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    # open_clip stores its causal mask, which is minus infinity above the diagonal.
    assert [key for key in bad if tensors[key].isnan().any() or not key.endswith("attn_mask")] == []
