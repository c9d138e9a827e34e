"""Options that several commands share, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from latte_convert.recipe import Recipe


class Granularity(str, Enum):
    """Whether a layer or each head has its own kernel scalars."""

    layer = "layer"
    head = "head"


class Scorer(str, Enum):
    """How sensitivity is measured."""

    paper = "paper"
    isolated = "isolated"
    greedy = "greedy"


MODEL, RECIPE, DATA, OUTPUT = "Model", "Recipe (each wins over the file)", "Samples", "Output"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local directory, safetensors file, or Hub id.")]
Calib = Annotated[
    list[str],
    typer.Option(
        "--calib",
        metavar="DATA",
        rich_help_panel=DATA,
        help="Unlabelled samples: a folder, a .txt/.jsonl/.csv/.parquet/.tar file, or hf:NAME[:SPLIT[:SLICE]]. "
        "Twice, images and texts, for a model with a tower for each.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", rich_help_panel=RECIPE, help="Recipe as YAML; see configs/."),
]
KernelName = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        rich_help_panel=RECIPE,
        help="Operator that replaces softmax, such as near_far or latte; auto: the cheapest per site that keeps the "
        "budget. [near_far]",
    ),
]
KernelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        rich_help_panel=RECIPE,
        help="An option of the kernel, such as clusters=64 or sigma=false. Repeatable.",
    ),
]
ScorerName = Annotated[
    Scorer | None,
    typer.Option(
        "--scorer",
        rich_help_panel=RECIPE,
        help="paper: block outputs, all sites converted; isolated: final output, one site at a time; greedy: final "
        "output, behind the sites chosen before. [isolated]",
    ),
]
Ratio = Annotated[
    float | None,
    typer.Option("--ratio", rich_help_panel=RECIPE, help="Share of eligible sites to convert. [0.67]"),
]
Count = Annotated[int | None, typer.Option("-k", rich_help_panel=RECIPE, help="Number of sites to convert.")]
MaxFlops = Annotated[
    float | None,
    typer.Option(
        "--max-flops",
        rich_help_panel=RECIPE,
        help="Convert the sites that lose least, until attention needs this share of the exact FLOPs.",
    ),
]
Speedup = Annotated[
    float | None,
    typer.Option(
        "--target-speedup",
        rich_help_panel=RECIPE,
        help="Convert the sites that lose least, until the model is this much faster, measured here.",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        rich_help_panel=RECIPE,
        help="Only these sites are candidates: whole dotted parts, e.g. 'layer.1' or 'vision_*'. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", rich_help_panel=RECIPE, help="These sites stay exact. Repeatable."),
]
Towers = Annotated[
    list[str] | None,
    typer.Option(
        "--towers",
        metavar="TOWER",
        rich_help_panel=RECIPE,
        help="Only this tower: vision, text, audio, encoder or decoder. Repeatable. [all]",
    ),
]
Heads = Annotated[
    Granularity | None,
    typer.Option("--granularity", rich_help_panel=RECIPE, help="Kernel scalars per layer or head."),
]
MinTokens = Annotated[
    int | None,
    typer.Option("--min-tokens", rich_help_panel=RECIPE, help="With fewer keys a site runs exact attention. [0]"),
]
Propagate = Annotated[
    bool | None,
    typer.Option(
        "--propagate-error/--no-propagate-error",
        rich_help_panel=RECIPE,
        help="Refit the chosen sites on the inputs they get behind converted ones. Slower.",
    ),
]
MinFidelity = Annotated[
    float | None,
    typer.Option(
        "--min-fidelity",
        rich_help_panel=RECIPE,
        help="Lowest accepted held-out cosine of the final output; exit code 4 below it. Without another budget: "
        "convert as much as keeps it.",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", rich_help_panel=DATA, help="Samples to use, held-out ones included. [32]"),
]
MinSamples = Annotated[
    int | None,
    typer.Option("--min-samples", rich_help_panel=DATA, help="Fewer usable samples are an error. [2]"),
]
Resolution = Annotated[
    int | None,
    typer.Option("--resolution", rich_help_panel=DATA, help="Image size in pixels. [the checkpoint's own]"),
]
Seed = Annotated[int | None, typer.Option("--seed", rich_help_panel=DATA, help="Seed of the choice of samples. [0]")]
Strict = Annotated[
    bool | None,
    typer.Option("--strict/--no-strict", rich_help_panel=DATA, help="The first unusable sample is an error."),
]
Device = Annotated[str, typer.Option("--device", rich_help_panel=MODEL, help="auto, cpu, cuda, cuda:1, mps.")]
Revision = Annotated[
    str | None,
    typer.Option("--revision", rich_help_panel=MODEL, help="Branch, tag or commit of a Hub model."),
]
Pickle = Annotated[
    bool,
    typer.Option("--allow-pickle", rich_help_panel=MODEL, help="Accept pytorch_model.bin (weights-only unpickling)."),
]
Remote = Annotated[
    bool,
    typer.Option("--trust-remote-code", rich_help_panel=MODEL, help="Run Python code of the checkpoint."),
]
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print the report as one JSON document on stdout."),
]


SETTINGS = (
    "kernel",
    "scorer",
    "ratio",
    "k",
    "max_flops",
    "target_speedup",
    "towers",
    "include",
    "exclude",
    "granularity",
    "min_tokens",
    "propagate_error",
    "min_fidelity",
    "samples",
    "min_samples",
    "resolution",
    "seed",
    "strict",
)


LOADING = ("device", "revision", "allow_pickle", "trust_remote_code")


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``convert`` and ``score`` of the library get from the options of their commands.

    Args:
        given: The value of each option, by the name of its parameter.

    Raises:
        RecipeError: The recipe does not validate.
        UsageError: An ``--option`` is no ``KEY=VALUE``.
    """
    return {"recipe": _recipe(given), **{key: given[key] for key in LOADING}}


def _recipe(given: Mapping[str, Any]) -> Recipe:
    """The recipe file with the options that were given on the command line."""
    from latte_convert.recipe import BUDGETS, Recipe

    values = {key: given[key] for key in SETTINGS if given.get(key) not in (None, [])}
    values = {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
    if given.get("option"):
        values["options"] = _kernel_options(given["option"])
    budgets = [key for key in BUDGETS if key in values]
    if len(budgets) == 1:  # one on the command line wins over another in the file
        values.update(dict.fromkeys((key for key in BUDGETS if key not in budgets), None))
    if given["config"] is None:
        return Recipe.build(values, origin="options")
    return Recipe.from_yaml(given["config"], **values)


def _kernel_options(pairs: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs, each value read as YAML: a number, true, false, null or a word."""
    import yaml

    from latte_convert.errors import UsageError

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--option takes KEY=VALUE, such as clusters=64, not '{pair}'.")
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(
                f"--option {key}: '{value}' is not a value; write a number, true, false or a word."
            ) from None
    return options
