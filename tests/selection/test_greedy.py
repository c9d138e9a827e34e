from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from latte_convert.adapters.host import Host
from latte_convert.data.feed import BatchFeed
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.selection import greedy
from latte_convert.selection.budget import Point, SiteCost, choose
from latte_convert.selection.greedy import greedy_order, path
from latte_convert.selection.isolated import isolated_scores
from latte_convert.selection.trials import try_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def setting(tiny_dino):
    """A model of six layers, two kernels for each site (the second worse and half as dear), errors and costs."""
    model = transformers.AutoModel.from_pretrained(tiny_dino).eval()
    host = Host.of(model)
    generator = torch.Generator().manual_seed(0)
    feed = BatchFeed([{"pixel_values": torch.randn(1, 3, 56, 56, generator=generator)} for _ in range(2)])
    sites = host.sites()
    candidates = {}
    for site in sites:
        candidates[site.name] = [LatteKernel(site.heads, site.head_dim, sigma=True) for _ in range(2)]
        with torch.no_grad():
            candidates[site.name][1].sigma.fill_(0.7)
    scores = isolated_scores(host, sites, candidates, feed)
    errors = {name: [score.value for score in each] for name, each in scores.items()}
    costs = {name: SiteCost(100 + i, (50, 25)) for i, name in enumerate(candidates)}
    return host, candidates, errors, feed, costs


def error_of(setting, chosen) -> float:
    host, candidates, _, feed, _ = setting
    return try_plan(host, {site: candidates[site][i] for site, i in chosen.items()}, feed).error


def full_scan(setting, costs):
    """The greedy order by trying every move in every round."""
    _, candidates, _, _, _ = setting
    chosen, order, error = {}, [], 0.0

    def flops(site, index):
        return costs[site].exact if index is None else costs[site].kernels[index]

    while True:
        best = None
        for site, index in itertools.product(candidates, range(2)):
            now = chosen.get(site)
            saved = 1 if costs is None else flops(site, now) - flops(site, index)
            if saved <= 0 or (costs is None and now is not None):
                continue
            found = error_of(setting, {**chosen, site: index})
            added = found - error
            price = added / saved if added > 0 else added * saved
            if best is None or price < best[0]:
                best = (price, site, index, found)
        if best is None:
            return order
        _, site, index, error = best
        chosen[site] = index
        order.append((site, index, error))


@pytest.mark.parametrize("priced", [False, True])
def test_each_step_is_the_best_of_all_moves(setting, priced, monkeypatch):
    host, candidates, errors, feed, costs = setting
    costs = costs if priced else None
    expected = full_scan(setting, costs)
    assert len(expected) >= 6
    monkeypatch.setattr(greedy, "WIDTH", 100)  # every move is measured in every round
    steps = greedy_order(host, candidates, errors, feed, costs=costs)
    assert [(step.site, step.kernel) for step in steps] == [(site, index) for site, index, _ in expected]
    assert [step.error for step in steps] == pytest.approx([error for _, _, error in expected], rel=1e-5)


def test_the_lazy_order_is_as_good_and_takes_fewer_passes(setting, monkeypatch):
    host, candidates, errors, feed, costs = setting
    passes = []

    run = Host.run

    def counted(self, inputs):
        passes.append(1)
        return run(self, inputs)

    monkeypatch.setattr(Host, "run", counted)
    found = {}
    for width in (greedy.WIDTH, 100):
        monkeypatch.setattr(greedy, "WIDTH", width)
        passes.clear()
        steps = greedy_order(host, candidates, errors, feed, costs=costs)
        found[width] = (len(passes), sum(step.error for step in steps), {step.site for step in steps})
    lazy, full = found.values()
    assert lazy[0] < 0.75 * full[0]
    assert lazy[1] <= 1.05 * full[1]
    assert lazy[2] == full[2] == set(candidates)


def test_it_ends_where_it_is_enough(setting):
    host, candidates, errors, feed, _ = setting
    steps = greedy_order(host, candidates, errors, feed, enough=lambda steps: len(steps) == 2)
    assert len(steps) == 2
    assert len({step.site for step in steps}) == 2
    assert greedy_order(host, candidates, errors, feed, enough=lambda _steps: True) == []


def test_kernels_that_are_not_finite_are_never_chosen(setting):
    host, candidates, errors, feed, costs = setting
    names = list(candidates)[:2]
    broken = LatteKernel(3, 16, sigma=True)
    with torch.no_grad():
        broken.sigma.fill_(float("nan"))
    # One is known not to be finite, the other turns out not to be.
    candidates = {names[0]: [candidates[names[0]][0], broken], names[1]: [broken]}
    errors = {names[0]: [errors[names[0]][0], float("inf")], names[1]: [0.0]}
    steps = greedy_order(host, candidates, errors, feed, costs=costs)
    assert [(step.site, step.kernel) for step in steps] == [(names[0], 0)]
    assert greedy_order(host, candidates, {name: [float("inf")] for name in names}, feed) == []


def test_the_path_is_a_frontier_with_measured_fidelity(setting):
    host, candidates, errors, feed, costs = setting
    steps = greedy_order(host, candidates, errors, feed, costs=costs)
    points = path(steps, costs)
    assert points[0] == Point({}, 1.0, 0.0, 1.0)
    assert points[-1].kernels == dict.fromkeys(candidates, 1)
    assert points[-1].flops == pytest.approx(6 * 25 / sum(range(100, 106)))
    flops = [point.flops for point in points]
    assert flops == sorted(flops, reverse=True)
    some = points[3]
    kernels = {site: candidates[site][i] for site, i in some.kernels.items()}
    measured = try_plan(host, kernels, feed)
    assert (some.error, some.likeness) == pytest.approx((measured.error, measured.worst.likeness))

    def never(_point):
        raise AssertionError("measured already")

    kept = choose(points, measure=never, speedup=never, min_fidelity=some.likeness)
    assert kept.likeness >= some.likeness
    assert kept.flops <= some.flops
