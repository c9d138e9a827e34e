"""The options of ``score`` and ``convert`` are the recipe's settings, with the recipe's own words."""

from __future__ import annotations

import pytest

from latte_convert.cli.options import read_recipe
from latte_convert.errors import UsageError
from latte_convert.recipe import Recipe

FLAGS = {"k": "-k", "options": "--option"}


@pytest.fixture(scope="module", params=["convert", "score"])
def help_text(request: pytest.FixtureRequest) -> str:
    import subprocess
    import sys

    command = [sys.executable, "-m", "latte_convert", request.param, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={"COLUMNS": "400"}).stdout
    return " ".join(shown.replace("│", " ").split())


def test_every_setting_is_an_option_with_its_description(help_text: str) -> None:
    for name, field in Recipe.model_fields.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        if name == "candidates":  # kernels with options of their own: in a file
            assert flag not in help_text
        else:
            assert f" {flag} " in help_text
            assert field.description in help_text


@pytest.mark.parametrize(
    "part",
    [
        "timm:NAME, open_clip:ARCH/TAG",
        "--strict --no-strict",
        "<paper|isolated|greedy>",
        "[default: (isolated)]",
        "--include PATTERN",
        "--option KEY=VALUE",
        "Which sites are converted",
        "Quality gate",
        "Example: latte ",
    ],
)
def test_help_shows(help_text: str, part: str) -> None:
    assert part in help_text


def test_what_was_not_given_stays_as_the_file_has_it() -> None:
    given = dict.fromkeys(Recipe.model_fields) | {"ratio": 0.5, "include": [], "strict": True}
    assert read_recipe("paper", given) == Recipe.from_yaml("paper", ratio=0.5, strict=True)


def test_options_of_the_kernel_are_yaml_values() -> None:
    given = {"options": ["window=8", "far=pooled", "sigma=false", "bias=null"]}
    assert read_recipe(None, given).options == {"window": 8, "far": "pooled", "sigma": False, "bias": None}


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 10_000, "!!python/name:os.system", "{"])
def test_an_option_that_is_no_value(value: str) -> None:
    with pytest.raises(UsageError, match="is not a value"):
        read_recipe(None, {"options": [f"window={value}"]})
