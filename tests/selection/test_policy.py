from __future__ import annotations

import dataclasses

import pytest

from latte_convert.adapters.sites import matches, restrict
from latte_convert.attention import AttentionSite
from latte_convert.errors import CheckpointError, RecipeError
from latte_convert.recipe import Recipe
from latte_convert.selection.budget import most_robust
from latte_convert.selection.policy import count, plan

SITES = [AttentionSite(f"encoder.layers.{i}.self_attn", "encoder", "self", False, 4, 16) for i in range(12)]
SCORES = {site.name: float(abs(i - 5)) for i, site in enumerate(SITES)}


def select(sites, scores, recipe):
    """The plan of a recipe with one kernel and a number of sites."""
    errors = {site.name: [scores[site.name]] for site in sites if site.eligible}
    wanted = count(sites, recipe)
    chosen = most_robust(errors, len(errors) if wanted is None else wanted)
    return plan(sites, dict.fromkeys(chosen, recipe.kernel), recipe)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.1", "encoder.layers.1.self_attn", True),
        ("layers.1", "encoder.layers.10.self_attn", False),
        ("layers.1*", "encoder.layers.10.self_attn", True),
        ("encoder.layers.1.self_attn", "encoder.layers.1.self_attn", True),
        ("self_attn", "encoder.layers.3.self_attn", True),
        ("attn", "encoder.layers.3.self_attn", False),
        ("encoder.*.self_attn", "encoder.layers.3.self_attn", False),
        ("encoder.*.*.self_attn", "encoder.layers.3.self_attn", True),
        ("layers.[0-3]", "encoder.layers.3.self_attn", True),
        ("encoder.layers.3.self_attn.more", "encoder.layers.3.self_attn", False),
    ],
)
def test_patterns_match_whole_parts(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_exclude_and_include_give_reasons():
    kept = restrict(SITES, Recipe(include=("layers.[1-4]",), exclude=("layers.1",)))
    assert [site.name for site in kept if site.eligible] == [f"encoder.layers.{i}.self_attn" for i in (2, 3, 4)]
    assert kept[1].reason == "excluded by the recipe"
    assert kept[0].reason == kept[11].reason == "not included by the recipe"


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_a_pattern_without_a_match_names_the_nearest(key):
    with pytest.raises(RecipeError, match=rf"{key} pattern 'layers\.12' matches no attention site"):
        restrict(SITES, Recipe(**{key: ("layers.12",)}))


def test_nothing_left_names_the_reasons():
    sites = [dataclasses.replace(site, eligible=False, reason="grouped-query attention") for site in SITES]
    with pytest.raises(CheckpointError, match="grouped-query attention"):
        restrict(sites, Recipe())
    with pytest.raises(CheckpointError, match="the model has none"):
        restrict([], Recipe())


def test_most_robust_first_in_tree_order():
    plan = select(SITES, SCORES, Recipe(k=3))
    assert [site.name for site in plan.converted] == [f"encoder.layers.{i}.self_attn" for i in (4, 5, 6)]
    assert len(plan.kept) == 9


@pytest.mark.parametrize(("ratio", "count"), [(0.67, 8), (0.0, 0), (1.0, 12), (0.5, 6)])
def test_ratio_rounds_over_eligible_sites(ratio, count):
    assert len(select(SITES, SCORES, Recipe(ratio=ratio)).converted) == count


def test_ratio_counts_eligible_sites_only():
    sites = restrict(SITES, Recipe(include=("layers.[0-2]",)))
    plan = select(sites, SCORES, Recipe(ratio=0.67))
    assert [site.name for site in plan.converted] == [f"encoder.layers.{i}.self_attn" for i in (1, 2)]
    assert len(plan.kept) == 10


def test_infinite_scores_are_never_chosen():
    scores = {**SCORES, SITES[5].name: float("inf")}
    assert SITES[5] not in select(SITES, scores, Recipe(ratio=1.0)).converted


def test_k_beyond_the_sites_is_an_error():
    with pytest.raises(RecipeError, match="k is 13, but only 12 of 12"):
        select(SITES, SCORES, Recipe(k=13))


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, 8),  # two thirds of twelve
    ({"k": 5}, 5),
    ({"k": 0}, 0),
    ({"ratio": 0.5}, 6),
    ({"ratio": 0.5, "min_fidelity": 0.9}, 6),
    ({"min_fidelity": 0.9}, None),
    ({"max_flops": 0.5}, None),
    ({"target_speedup": 1.5}, None),
])  # fmt: skip
def test_who_decides_how_many(settings, expected):
    assert count(SITES, Recipe(**settings)) == expected


def test_each_converted_site_has_its_kernel():
    made = plan(SITES, {SITES[7].name: "near_far", SITES[2].name: "monarch"}, Recipe(min_tokens=99))
    assert made.converted == (SITES[2], SITES[7])
    assert len(made.kept) == 10
    assert list(made.kernels.items()) == [(SITES[2].name, "monarch"), (SITES[7].name, "near_far")]
    assert made.min_tokens == 99


def test_scores_alone_give_all_sites_the_kernel_of_the_recipe():
    made = select(SITES, SCORES, Recipe(k=2, kernel="latte"))
    assert dict(made.kernels) == {SITES[4].name: "latte", SITES[5].name: "latte"}


def test_the_plan_is_frozen():
    plan = select(SITES, SCORES, Recipe(k=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.min_tokens = 3
