"""Kernels by name, those from outside the package included."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.errors import RecipeError, UsageError
from latte_convert.kernels import Kernel, get_kernel, kernel_names, register_kernel, registry
from latte_convert.recipe import Recipe

PLUGIN = """
from latte_convert.kernels.exact import ExactKernel

class Other(ExactKernel):
    name = "other"
"""


class Doubled(Kernel):
    name = "doubled"
    causal_form = True

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return 2 * call.query

    def attend_flops(self, shape: CallShape) -> int:
        return 0


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.KERNELS, "registered", {})


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Install a package with one entry point of our group."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(line: str, source: str = PLUGIN) -> None:
        info = tmp_path / "other_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kernels\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.KERNELS.group}]\n{line}\n")
        (tmp_path / "other_kernels.py").write_text(source)

    yield install
    sys.modules.pop("other_kernels", None)


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
    with pytest.raises(RecipeError, match=r"unknown kernel 'late' \(nearest: latte\b.*install the package"):
        get_kernel("late")


def test_a_name_near_to_none_gets_the_choices() -> None:
    with pytest.raises(RecipeError, match=r"choose from: blocks, elu, exact, …"):
        get_kernel("zzz")


def test_a_registered_kernel_goes_by_its_name_and_may_be_registered_again() -> None:
    assert register_kernel(Doubled) is Doubled
    assert register_kernel(Doubled) is Doubled
    assert get_kernel("doubled") is Doubled
    assert "doubled" in kernel_names()
    (candidate,) = Recipe(kernel="doubled", options={"sigma": True}).kernels()
    assert candidate.options == {"sigma": True}


def test_a_name_that_is_taken_and_what_is_no_kernel_are_refused() -> None:
    register_kernel(Doubled)
    for name in ("latte", "doubled"):
        with pytest.raises(UsageError, match=f"a kernel named '{name}' already"):
            register_kernel(type("Another", (Doubled,), {"name": name}))
    for wrong in (object, Kernel, type("Nameless", (Doubled,), {"name": ""})):
        with pytest.raises(UsageError, match="cannot be registered"):
            register_kernel(wrong)  # type: ignore[type-var]


def test_an_installed_package_offers_a_kernel_that_is_imported_when_asked_for(offer) -> None:  # type: ignore[no-untyped-def]
    offer("other = other_kernels:Other")
    assert "other" in kernel_names()
    assert "other_kernels" not in sys.modules
    assert get_kernel("other").__module__ == "other_kernels"
    assert Recipe(kernel="other").kernels()[0].kernel == "other"


def test_a_name_of_ours_stays_ours(offer) -> None:  # type: ignore[no-untyped-def]
    offer("latte = other_kernels:Other")
    assert get_kernel("latte").__module__ == "latte_convert.kernels.latte.kernel"


@pytest.mark.parametrize(
    ("line", "source", "message"),
    [
        ("other = other_kernels:Other", "import nothing_of_that_name", "'other' of package other-kernels cannot be"),
        ("other = other_kernels:Absent", PLUGIN, "'other' of package other-kernels cannot be imported: .*Absent"),
        ("second = other_kernels:Other", PLUGIN, "other_kernels:Other of package other-kernels is no kernel named"),
        ("other = other_kernels:ExactKernel", PLUGIN, "is no kernel named 'other'"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(offer, line: str, source: str, message: str) -> None:  # type: ignore[no-untyped-def]
    offer(line, source)
    with pytest.raises(RecipeError, match=message):
        get_kernel(line.split()[0])
