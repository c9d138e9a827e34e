from __future__ import annotations

import pytest
import torch
from adapters import tiny_models
from tiny_parts import pixels

from latte_convert.adapters.host import Host
from latte_convert.data.feed import BatchFeed
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.selection.costs import site_costs


@pytest.mark.parametrize(("min_tokens", "converted"), [(0, (12, 7)), (8, (12,)), (13, ())])
def test_flops_of_all_calls(min_tokens, converted):
    model = tiny_models.build("bert")  # 4 heads of 8
    feed = BatchFeed([{"input_ids": torch.arange(4, 4 + length)[None]} for length in (12, 7)])
    host = Host.of(model)
    site = next(site for site in host.sites() if site.eligible)
    kernel = LatteKernel(site.heads, site.head_dim)
    cost = site_costs(host, {site.name: [kernel, kernel]}, feed, min_tokens=min_tokens)[site.name]
    softmax = {length: 2 * 2 * length**2 * 32 for length in (12, 7)}  # two matmuls, 2 FLOPs a multiply-add
    assert cost.exact == sum(softmax.values())
    # Keys times values, and queries times that: N·H·d² multiply-adds each; the row of ones and the sums come on top.
    linear = sum(2 * 2 * length * 4 * 8 * 8 for length in converted)
    exact = sum(softmax[length] for length in (12, 7) if length not in converted)
    assert linear + exact <= cost.kernels[0] == cost.kernels[1] <= 1.4 * linear + exact
    assert cost.saving(0) == max(cost.exact - cost.kernels[0], 1)


def test_a_site_that_is_not_called_costs_nothing():
    model = tiny_models.build("clip")
    host = Host.of(model)
    sites = [site for site in host.sites() if site.eligible]
    kernels = {site.name: [LatteKernel(site.heads, site.head_dim)] for site in sites}

    class Images(BatchFeed):
        def __getitem__(self, index):
            from latte_convert.data.feed import Inputs

            return Inputs(self.batches[index], "get_image_features", "vision")

    costs = site_costs(host, kernels, Images([pixels(1)]))
    assert {site.tower for site in sites if costs[site.name].exact > 0} == {"vision"}
    assert {costs[site.name].kernels for site in sites if site.tower == "text"} == {(0,)}
