"""Options of kernels, as their constructors declare them."""

from __future__ import annotations

import pytest

from latte_convert.errors import RecipeError
from latte_convert.kernels.base import Extras
from latte_convert.kernels.options import kernels_with, options_of, resolve_options
from latte_convert.kernels.registry import get_kernel, kernel_names


def test_options_are_the_keyword_arguments_of_a_constructor_and_the_extras() -> None:
    extras = set(Extras.__annotations__)
    assert set(options_of(get_kernel("elu"))) == extras
    assert set(options_of(get_kernel("latte"))) == extras | {"granularity", "tte", "jpn"}
    assert kernels_with("granularity") == ["latte", "taylor2"]
    assert kernels_with("sigma") == list(kernel_names())


def test_what_helped_a_kernel_is_its_default_and_what_is_given_wins() -> None:
    assert resolve_options("latte", {}) == {"exact_prefix": True, "sigma": True}
    given = {"sigma": False, "exact_prefix": False, "jpn": False, "granularity": "head"}
    assert resolve_options("latte", given) == given


def test_a_default_that_depends_on_the_channels_is_left_open() -> None:
    kernel = get_kernel("performer")(2, 64, **resolve_options("performer", {}))
    assert kernel.options["features"] == get_kernel("performer")(2, 64).options["features"]


def test_an_option_that_may_be_left_open_can_be_null() -> None:
    assert resolve_options("near_far", {"clusters": None})["clusters"] is None


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("exact", {}, "what the model has already"),
        ("late", {}, r"unknown kernel 'late' \(nearest: latte"),
        ("latte", {"jnp": True}, r"kernel 'latte' has no option 'jnp' \(nearest: jpn"),
        ("near_far", {"clusters": "many"}, "'clusters' of kernel 'near_far' is 'many': it should be a valid integer"),
        ("near_far", {"clusters": True}, "is True: it should be a valid integer"),
        ("near_far", {"clusters": 1.5}, "is 1.5: it should be a valid integer"),
        ("near_far", {"clusters": -1}, "options of kernel 'near_far': .*`clusters` is -1: set it to"),
        ("near_far", {"far": "away"}, "is 'away': it should be 'pooled' or 'clustered'"),
        ("near_far", {"sigma": "maybe"}, "'sigma' of kernel 'near_far' is 'maybe': it should be a valid boolean"),
        ("latte", {"tte": 5}, "'tte' of kernel 'latte' is 5: it should be a valid boolean"),
        ("latte", {"exact_prefix": None}, "is None: it should be a valid boolean"),
        ("latte", {"granularity": "channel"}, "is 'channel': it should be 'layer' or 'head'"),
        ("performer", {"features": 10**15}, "`features` is 10+: set it to a whole number, 1 to 16384"),
    ],
)
def test_what_does_not_fit_is_named(kernel: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        resolve_options(kernel, options)
    assert error.value.exit_code == 3
