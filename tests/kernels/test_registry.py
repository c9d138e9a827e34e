"""Kernels by name."""

from __future__ import annotations

import pytest

from latte_convert.errors import RecipeError
from latte_convert.kernels import Kernel, get_kernel, kernel_names


def test_names_are_sorted_and_include_the_exact_kernel() -> None:
    names = kernel_names()
    assert list(names) == sorted(set(names))
    assert {"exact", "latte"} <= set(names)


@pytest.mark.parametrize("name", kernel_names())
def test_every_name_gives_a_kernel_of_that_name(name: str) -> None:
    kernel = get_kernel(name)(2, 4)
    assert isinstance(kernel, Kernel)
    assert kernel.name == name
    assert (kernel.heads, kernel.head_dim) == (2, 4)


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"unknown kernel 'late' \(nearest: latte\b"):
        get_kernel("late")


def test_a_name_near_to_none_gets_the_choices() -> None:
    with pytest.raises(RecipeError, match=r"choose from: elu, exact, fitted, …"):
        get_kernel("zzz")
