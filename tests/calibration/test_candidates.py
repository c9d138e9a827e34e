"""From recipes to kernels with all their options."""

from __future__ import annotations

import pytest

from latte_convert.calibration.candidates import AUTO, candidates
from latte_convert.errors import RecipeError
from latte_convert.kernels.registry import get_kernel
from latte_convert.recipe import Candidate, Recipe


def test_what_helped_a_kernel_is_its_default_and_the_recipe_wins() -> None:
    (default,) = candidates(Recipe(kernel="latte"))
    recommended = get_kernel("latte").recommended
    assert {name: default.options.get(name, False) for name in recommended} == recommended
    (plain,) = candidates(Recipe(kernel="latte", sigma=False, exact_prefix=False, jpn=False, granularity="head"))
    assert (plain.options["sigma"], plain.options["exact_prefix"]) == (False, False)
    assert (plain.options["jpn"], plain.options["granularity"]) == (False, "head")


def test_options_of_the_recipe_win_over_everything() -> None:
    (chosen,) = candidates(Recipe(kernel="latte", sigma=True, options={"sigma": False, "tte": False}))
    assert chosen.options["sigma"] is False
    assert chosen.options["tte"] is False


def test_a_setting_of_another_kernel_is_not_passed_on() -> None:
    (elu,) = candidates(Recipe(kernel="elu", granularity="head"))
    assert "granularity" not in elu.options


def test_a_default_that_depends_on_the_channels_is_left_open() -> None:
    (performer,) = candidates(Recipe(kernel="performer"))
    kernel = get_kernel("performer")(2, 64, **performer.options)
    assert kernel.options["features"] == get_kernel("performer")(2, 64).options["features"]


def test_auto_has_our_list_or_the_recipes() -> None:
    assert [each.kernel for each in candidates(Recipe(kernel="auto"))] == [each.kernel for each in AUTO]
    own = (Candidate(kernel="elu"), Candidate(kernel="latte", options={"jpn": False}))
    assert [each.kernel for each in candidates(Recipe(kernel="auto", candidates=own))] == ["elu", "latte"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(kernel="exact"), "what the model has already"),
        (Recipe(kernel="late"), "unknown kernel 'late' .nearest: latte"),
        (Recipe(kernel="latte", options={"jnp": True}), "kernel 'latte' has no option 'jnp' .nearest: jpn"),
        (Recipe(kernel="near_far", options={"clusters": -1}), "options of kernel 'near_far'"),
        (Recipe(kernel="near_far", options={"window": "big"}), "option 'window' of kernel 'near_far' is 'big'"),
    ],
)
def test_bad_options_are_named(recipe: Recipe, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        candidates(recipe)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("near_far", {"clusters": "many"}, "'clusters' of kernel 'near_far' is 'many': it should be a valid integer"),
        ("near_far", {"clusters": True}, "is True: it should be a valid integer"),
        ("near_far", {"clusters": 1.5}, "is 1.5: it should be a valid integer"),
        ("near_far", {"far": "away"}, "is 'away': it should be 'pooled' or 'clustered'"),
        ("near_far", {"sigma": "maybe"}, "'sigma' of kernel 'near_far' is 'maybe': it should be a valid boolean"),
        ("latte", {"tte": 5}, "'tte' of kernel 'latte' is 5: it should be a valid boolean"),
        ("latte", {"exact_prefix": None}, "is None: it should be a valid boolean"),
        ("performer", {"features": 10**15}, "`features` is 10+: set it to a whole number, 1 to 16384"),
    ],
)
def test_values_of_the_wrong_type_are_no_options(kernel: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        candidates(Recipe(kernel=kernel, options=options))


def test_an_option_that_may_be_left_open_can_be_null() -> None:
    (chosen,) = candidates(Recipe(kernel="near_far", options={"clusters": None}))
    assert chosen.options["clusters"] is None
