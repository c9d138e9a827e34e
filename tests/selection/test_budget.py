from __future__ import annotations

import itertools
import random

import pytest

from latte_convert.errors import GateError
from latte_convert.selection import budget
from latte_convert.selection.budget import (
    Point,
    SiteCost,
    choose,
    flops_share,
    frontier,
    most_robust,
    spaced,
    that_save,
    that_work,
)

INFINITE = float("inf")


def random_instance(seed: int):
    """Errors and costs of up to five sites with up to three kernels; some infinite, some dearer than softmax."""
    rng = random.Random(seed)
    errors, costs = {}, {}
    for i in range(rng.randint(1, 5)):
        kernels = rng.randint(1, 3)
        errors[f"site{i}"] = [rng.choice([rng.random(), rng.random() ** 3, INFINITE]) for _ in range(kernels)]
        costs[f"site{i}"] = SiteCost(rng.randint(20, 40), tuple(rng.randint(1, 45) for _ in range(kernels)))
    return errors, costs


def all_plans(errors, costs, convert=None):
    """Every plan there is, with the cost that decides: a conversion that is a choice saves at least one FLOP."""
    most = INFINITE if convert is not None else -1
    choices = []
    for site in costs:
        usable = [i for i, error in enumerate(errors[site]) if error < INFINITE]
        if convert is None or site not in convert:
            usable = [None] if convert is not None else [None, *usable]
        choices.append([(site, i) for i in (usable or [None])])
    for plan in itertools.product(*choices):
        kernels = {site: i for site, i in plan if i is not None}
        cost = sum(
            min(costs[site].kernels[kernels[site]], costs[site].exact + most) if site in kernels else costs[site].exact
            for site in costs
        )
        yield kernels, cost, sum(errors[site][i] for site, i in kernels.items())


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_the_frontier_is_that_of_all_plans(seed, forced):
    errors, costs = random_instance(seed)
    convert = [site for i, site in enumerate(errors) if i % 2 == 0] if forced else None
    plans = list(all_plans(errors, costs, convert))
    best = {
        (cost, error)
        for _, cost, error in plans
        if not any((c <= cost and e < error) or (c < cost and e <= error) for _, c, e in plans)
    }
    expected = sorted(error for _, error in best)
    points = frontier(errors, costs, convert=convert)
    assert [point.error for point in points] == pytest.approx(expected)
    total = sum(cost.exact for cost in costs.values())
    for point in points:
        left = sum(
            cost.kernels[point.kernels[site]] if site in point.kernels else cost.exact for site, cost in costs.items()
        )
        assert point.flops == pytest.approx(left / total)
        assert point.error == pytest.approx(sum(errors[site][i] for site, i in point.kernels.items()))
        assert list(point.kernels) == [site for site in costs if site in point.kernels]


def test_equal_sites_are_converted_in_the_order_of_their_errors():
    errors = {"a": [0.3], "b": [0.1], "c": [0.2], "d": [INFINITE]}
    points = frontier(errors, dict.fromkeys(errors, SiteCost(10, (4,))))
    assert [set(point.kernels) for point in points] == [set(), {"b"}, {"b", "c"}, {"a", "b", "c"}]
    assert [point.flops for point in points] == pytest.approx([1, 0.85, 0.7, 0.55])
    assert [point.error for point in points] == pytest.approx([0, 0.1, 0.3, 0.6])


def test_sites_too_short_to_save_anything_can_be_converted():
    points = frontier({"a": [0.1], "b": [0.2]}, {"a": SiteCost(5, (9,)), "b": SiteCost(5, (5,))})
    assert [set(point.kernels) for point in points] == [set(), {"a"}, {"a", "b"}]
    assert [point.flops for point in points] == pytest.approx([1, 1.4, 1.4])


def test_a_budget_of_cost_takes_no_site_that_saves_nothing():
    errors = {"short": [0.0, 0.0], "long": [0.1, INFINITE], "even": [0.0]}
    costs = {"short": SiteCost(100, (250, 100)), "long": SiteCost(100, (40, 10)), "even": SiteCost(100, (100,))}
    assert that_save(errors, costs) == {"short": [INFINITE] * 2, "long": [0.1, INFINITE], "even": [INFINITE]}
    points = frontier(that_save(errors, costs), costs)
    assert points == [Point({}, 1.0, 0.0), Point({"long": 0}, pytest.approx(0.8), 0.1)]
    # Counted as a saving, the short site's faithful kernel would be in every plan, and none would be within the budget.
    assert choose(points, measure=cosine(), speedup=speed(), max_flops=0.8) is points[1]


def test_many_plans_are_thinned_and_stay_close_to_the_best(monkeypatch):
    rng = random.Random(0)
    errors = {f"s{i}": [rng.random() for _ in range(3)] for i in range(14)}
    costs = {site: SiteCost(10**6, tuple(rng.randint(1, 10**6) for _ in range(3))) for site in errors}
    exact = frontier(errors, costs)
    monkeypatch.setattr(budget, "LIMIT", 60)
    thinned = frontier(errors, costs)
    assert len(thinned) <= 60 < len(exact)
    assert thinned[0] == exact[0] == Point({}, 1.0, 0.0)
    assert thinned[-1].flops == exact[-1].flops
    for point in thinned:  # at most one step of FLOPs per site off
        best = min(p.error for p in exact if p.flops <= point.flops + len(errors) / 58)
        assert point.error <= min(p.error for p in exact if p.flops <= point.flops - len(errors) / 58 or p is exact[-1])
        assert point.error >= best


def test_the_most_robust_sites():
    errors = {"a": [0.5, 0.2], "b": [0.1], "c": [INFINITE], "d": [0.3, INFINITE], "e": []}
    assert most_robust(errors, 2) == ["b", "a"]
    assert most_robust(errors, 5) == ["b", "a", "d"]
    assert most_robust({"x": [0.1], "y": [0.1]}, 1) == ["x"]


def test_no_attention_at_all():
    assert flops_share({}, {}) == 1.0
    assert frontier({}, {}) == [Point({}, 1.0, 0.0)]


# Ten plans: i sites converted, 1 - 0.08 i of the FLOPs, cosine 1 - i² / 100, speed 1 + 0.1 i.
POINTS = [Point({f"s{j}": j % 2 for j in range(i)}, 1 - 0.08 * i, 0.01 * i * i) for i in range(10)]


class Meter:
    """Measures a plan by its number of sites, and remembers which it was asked for."""

    def __init__(self, value):
        self.value = value
        self.asked = []

    def __call__(self, point):
        self.asked.append(len(point.kernels))
        return self.value(len(point.kernels))


def cosine():
    return Meter(lambda i: 1 - i * i / 100)


def speed():
    return Meter(lambda i: 1 + 0.1 * i)


def chosen(**limits) -> int:
    limits = {"measure": cosine(), "speedup": speed(), **limits}
    return len(choose(POINTS, **limits).kernels)


def test_without_a_budget_the_most_faithful_plan_wins():
    assert chosen() == 0
    assert choose(POINTS[3:], measure=cosine(), speedup=speed()) is POINTS[3]


@pytest.mark.parametrize(("limits", "expected"), [
    ({"max_flops": 0.99}, 1),
    ({"max_flops": 0.5}, 7),  # 1 - 0.56 = 0.44; six sites would need 0.52
    ({"max_flops": 0.3}, 9),
    ({"min_fidelity": 0.9}, 3),  # 1 - 0.09; four sites would have 0.84
    ({"min_fidelity": 0.15}, 9),
    ({"min_fidelity": 0.99}, 1),
    ({"target_speedup": 1.35}, 4),
    ({"target_speedup": 1.9}, 9),
    ({"target_speedup": 1.01}, 1),  # never the original, timed against itself
    ({"max_flops": 0.5, "min_fidelity": 0.5}, 7),
    ({"target_speedup": 1.35, "min_fidelity": 0.8}, 4),
])  # fmt: skip
def test_the_plan_that_a_budget_picks(limits, expected):
    assert chosen(**limits) == expected


def test_few_plans_are_measured():
    measure, speedup = cosine(), speed()
    choose(POINTS, measure=measure, speedup=speedup, min_fidelity=0.9)
    assert len(measure.asked) <= 5
    assert speedup.asked == []
    choose(POINTS, measure=measure, speedup=speedup, target_speedup=1.5)
    assert len(speedup.asked) <= 5
    assert len(set(measure.asked)) == len(measure.asked)


def test_a_known_fidelity_is_not_measured_again():
    points = [Point(p.kernels, p.flops, p.error, 1 - 0.1 * len(p.kernels)) for p in POINTS]
    measure = cosine()
    assert len(choose(points, measure=measure, speedup=speed(), min_fidelity=0.65).kernels) == 3
    assert measure.asked == []


@pytest.mark.parametrize(("limits", "message"), [
    ({"max_flops": 0.2}, r"at most 20% of the exact.*nearest: 9 sites converted \(5 x even, 4 x odd\), 28.0% of"),
    ({"min_fidelity": 0.995}, r"fidelity of 0.995 .* the nearest has a likeness of 0.9900: 1 sites converted \(1 x ev"),
    ({"target_speedup": 2.0}, r"2 times as fast as the original; the nearest reaches 1.90: 9 sites converted"),
    ({"max_flops": 0.5, "min_fidelity": 0.9}, r"no plan meets both budgets.*likeness of 0.5100 .*not 0.9: 7 sites"),
])  # fmt: skip
def test_a_budget_that_no_plan_meets_shows_the_nearest(limits, message):
    with pytest.raises(GateError, match=message) as caught:
        chosen(**limits, label=lambda _site, index: ("even", "odd")[index])
    assert caught.value.exit_code == 4


def test_the_fastest_plan_need_not_be_the_cheapest():
    # Below half of the FLOPs the kernels' overhead wins: the search does not stop at the slow end.
    hump = Meter(lambda i: 1 + 0.1 * min(i, 12 - 2 * i))
    assert len(choose(POINTS, measure=cosine(), speedup=hump, target_speedup=1.35).kernels) == 4
    with pytest.raises(GateError, match=r"nearest reaches 1\.40: 4 sites"):
        choose(POINTS, measure=cosine(), speedup=hump, target_speedup=1.6)


def test_nothing_but_the_original_meets_no_fidelity():
    with pytest.raises(GateError, match="no kernel gives a finite output"):
        choose(POINTS[:1], measure=cosine(), speedup=speed(), min_fidelity=0.1)


def test_a_fidelity_that_is_not_a_number_is_not_met():
    with pytest.raises(GateError, match=r"fidelity of 0\.5"):
        choose(POINTS, measure=lambda _point: float("nan"), speedup=speed(), min_fidelity=0.5)


def test_points_for_a_table():
    assert [len(point.kernels) for point in spaced(POINTS, 4)] == [0, 3, 6, 9]
    assert spaced(POINTS, 50) == POINTS
    assert spaced(POINTS[:1], 5) == POINTS[:1]


def test_the_most_robust_sites_are_those_that_lose_least() -> None:
    errors = {"short": [0.0], "long": [0.2], "longer": [0.1], "broken": [float("inf")]}
    assert most_robust(errors, 2) == ["short", "longer"]
    assert most_robust(errors, 9) == ["short", "longer", "long"]


def test_a_kernel_that_is_softmax_itself_is_no_choice() -> None:
    costs = {
        "short": SiteCost(100, (100, 60), idle=(True, False)),
        "long": SiteCost(100, (100, 100), idle=(True, True)),
    }
    assert that_work({"short": [0.0, 0.2], "long": [0.0, 0.0]}, costs) == {
        "short": [float("inf"), 0.2],
        "long": [float("inf"), float("inf")],
    }


@pytest.mark.parametrize("limits", [{"target_speedup": 1.01}, {"max_flops": 0.99}])
def test_a_budget_of_cost_is_not_met_by_the_original(limits) -> None:
    with pytest.raises(GateError, match="no plan"):
        choose(POINTS[:1], measure=cosine(), speedup=speed(), **limits)
