"""Token merging against small cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.bench.merging import Merger, assignment, mergeable
from latte_convert.checkpoints.resolve import resolve
from latte_convert.errors import CheckpointError


def test_the_most_similar_pair_merges():
    # Prefix, then tokens a0 b0 a1 b1: a1 points where b0 does, a0 is orthogonal to both.
    metric = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, -1.0]]])
    index = assignment(metric, 1, prefix=1)
    # New tokens: prefix 0, a0 1, b0 2, b1 3; a1 joins b0.
    assert index.tolist() == [[0, 1, 2, 2, 3]]


def test_half_of_an_odd_number():
    metric = torch.randn(2, 1 + 5, 4, generator=torch.Generator().manual_seed(0))
    index = assignment(metric, 2, prefix=1)
    assert index.shape == (2, 6)
    for row in index.tolist():
        assert set(row) == set(range(4))
        assert row[0] == 0


@pytest.fixture(scope="module")
def model(tiny_dino: Path):
    source = resolve(tiny_dino)
    return source.instantiate(source.original_tensors())[0]


def forward(model, pixels):
    with torch.no_grad():
        return model(pixel_values=pixels).last_hidden_state


def test_tokens_disappear_block_by_block_and_come_back(model):
    host = Host.of(model)
    sites = mergeable(host.sites(), {"vision"})
    counts: list[int] = []
    blocks = model.get_submodule(sites[0].name.rpartition(".layer.")[0] + ".layer")
    hooks = [b.register_forward_pre_hook(lambda _m, args: counts.append(args[0].shape[1])) for b in blocks]
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    exact = forward(model, pixels)
    counts.clear()
    with Merger(host, sites, 2):
        merged = forward(model, pixels)
    assert counts == [17, 15, 13, 11, 9, 7]
    assert merged.shape == exact.shape
    assert len(merged[0, 1:].unique(dim=0)) == 6  # 16 patches, 5 times 2 of them gone; the last block merges none
    assert not torch.equal(merged, exact)
    for hook in hooks:
        hook.remove()
    assert torch.equal(forward(model, pixels), exact)


def test_merging_all_that_can_be_merged_ends_with_one_patch(model):
    host = Host.of(model)
    sites = mergeable(host.sites(), {"vision"})
    with Merger(host, sites, 100):
        merged = forward(model, torch.randn(1, 3, 56, 56))
    assert len(merged[0, 1:].unique(dim=0)) == 1


def test_equal_tokens_lose_nothing_by_merging(model):
    """Without positions an even image has equal patches; proportional attention makes merging them exact."""
    host = Host.of(model)
    sites = mergeable(host.sites(), {"vision"})
    positions = model.embeddings.position_embeddings
    kept = positions.data.clone()
    positions.data.zero_()
    try:
        pixels = torch.full((1, 3, 56, 56), 0.3)
        exact = forward(model, pixels)
        with Merger(host, sites, 3):
            assert torch.allclose(forward(model, pixels), exact, atol=1e-4)
    finally:
        positions.data.copy_(kept)


@pytest.mark.parametrize("towers", [{"text"}, {"vision", "text"}, set()])
def test_only_one_vision_tower_is_merged(model, towers):
    with pytest.raises(CheckpointError, match="vision towers only"):
        mergeable(find_adapter(model).sites(model), towers)
