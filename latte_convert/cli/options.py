"""Options that several commands share. Those of the recipe are made from its fields: one for every setting."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

from latte_convert.errors import UsageError
from latte_convert.recipe import BUDGETS, Recipe

MODEL, DATA, OUTPUT = "Model", "Calibration", "Output"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A Hub id, a local directory or safetensors file, timm:NAME, open_clip:ARCH/TAG, or an artifact of "
        "latte. An existing path wins over a Hub id.",
    ),
]
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
Factory = Annotated[
    str | None,
    typer.Option(
        "--model-factory",
        metavar="MODULE:FUNCTION",
        rich_help_panel=MODEL,
        help="Import and call a function of yours that builds the model, such as my.module:build. MODEL is then its "
        "weights, if they are not its own, and DATA a folder of .safetensors files, each with the tensors of one call.",
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Keep each finished fit, score and trial here: a run that was ended is taken up where it was, and another "
        "recipe uses what is the same in it.",
    ),
]
Offload = Annotated[
    Path | None,
    typer.Option(
        "--offload",
        metavar="DIR",
        rich_help_panel=MODEL,
        help="For a model larger than memory: the weights of each block stay in the checkpoint's files until it runs. "
        "What the files do not hold as it is needed goes into DIR.",
    ),
]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="An artifact that 'latte convert' wrote.")]
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
    typer.Option("--trust-remote-code", rich_help_panel=MODEL, help="Run Python code that came with the checkpoint."),
]
AllowImport = Annotated[
    bool,
    typer.Option(
        "--allow-import",
        rich_help_panel=MODEL,
        help="Import and call the function that the artifact names as the builder of its model.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", rich_help_panel=OUTPUT, help="Replace what --out names, if it exists.")
]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON document on stdout and nothing else.")
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        rich_help_panel="Recipe",
        help="A recipe as YAML, or one that comes with the tool: default, linear, paper. Options win over it.",
    ),
]

_MOVED = ("granularity",)
"""Former options of their own: the recipe says where each setting went."""
_FLAGS = {"k": ("-k",), "options": ("--option",)}
_METAVARS = {"options": "KEY=VALUE", "towers": "TOWER", "include": "PATTERN", "exclude": "PATTERN"}


def _is_option(name: str) -> bool:
    """Whether a setting can be given on the command line; the kernels that ``auto`` chooses from need a file."""
    return name in Recipe.model_fields and name != "candidates"


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's ``recipe`` parameter by ``--config`` and one option for each setting.

    The command is called with the recipe that they make.
    """
    signature = inspect.signature(command, eval_str=True)
    settings = [_parameter(name) for name in Recipe.model_fields if _is_option(name)] + [*map(_moved, _MOVED)]
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {each.name: given.pop(each.name) for each in settings}
        recipe = read_recipe(given.pop("config"), values)
        command(**given, recipe=recipe)

    parameters = []
    for parameter in signature.parameters.values():
        made = [config, *settings] if parameter.name == "recipe" else [parameter]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in made]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(name: str) -> inspect.Parameter:
    """The option of a setting; None where it was not given."""
    field = Recipe.model_fields[name]
    given, repeatable = _given_type(field.annotation)
    flag = name.replace("_", "-")
    flags = _FLAGS.get(name, (f"--{flag}/--no-{flag}",) if given is bool else (f"--{flag}",))
    extra = field.json_schema_extra
    option = typer.Option(
        *flags,
        metavar=_METAVARS.get(name),
        rich_help_panel=str(extra["group"]) if isinstance(extra, dict) else None,
        help=f"{field.description}{' Repeatable.' if repeatable else ''}",
        show_default=_shown(field.default),
    )
    annotation = Annotated[(list[given] if repeatable else given) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _moved(name: str) -> inspect.Parameter:
    """A hidden option; whoever still gives it gets the recipe's answer."""
    annotation = Annotated[str | None, typer.Option(f"--{name}", hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _given_type(annotation: Any) -> tuple[Any, bool]:
    """What the command line takes for a setting of a type, and whether it takes several."""
    if get_origin(annotation) is UnionType:
        annotation = next(each for each in get_args(annotation) if each is not NoneType)
    if get_origin(annotation) in (tuple, dict):
        return str, True
    return annotation, False


def _shown(default: Any) -> str | bool:
    """A default as the help shows it; False for a switch that is off and for an empty list."""
    if default is None or default is False or default in ((), {}):
        return False
    return "on" if default is True else str(default)


def read_recipe(config: str | None, given: Mapping[str, Any]) -> Recipe:
    """The recipe file with the options that were given on the command line.

    Args:
        config: A YAML file or the name of a recipe that comes with the tool; None is the default recipe.
        given: The value of each option by the name of its setting; None or empty where it was not given.

    Raises:
        RecipeError: The recipe does not validate.
        UsageError: An ``--option`` is not ``KEY=VALUE``.
    """
    values = {key: value for key, value in given.items() if value not in (None, [])}
    if "options" in values:
        values["options"] = _kernel_options(values["options"])
    budgets = [key for key in BUDGETS if key in values]
    if len(budgets) == 1:  # one on the command line wins over another in the file
        values.update(dict.fromkeys((key for key in BUDGETS if key not in budgets), None))
    if config is None:
        return Recipe.build(values, origin="options")
    return Recipe.from_yaml(config, **values)


def _kernel_options(pairs: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs, each value read as YAML: a number, true, false, null or a word."""
    from latte_convert.reading import Unreadable, parse_yaml

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--option takes KEY=VALUE, such as clusters=64, not '{pair}'.")
        try:
            options[key.strip()] = parse_yaml(value)
        except Unreadable:
            raise UsageError(
                f"--option {key}: '{value}' is not a value; write a number, true, false or a word."
            ) from None
    return options
