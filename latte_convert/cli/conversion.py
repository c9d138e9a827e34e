"""``latte score`` and ``latte convert``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latte_convert.cli import console

if TYPE_CHECKING:
    from latte_convert.recipe import Recipe
    from latte_convert.report.schema import Report


class Granularity(str, Enum):
    """Whether a layer or each head has its own kernel scalars."""

    layer = "layer"
    head = "head"


_MODEL, _RECIPE, _DATA, _OUTPUT = "Model", "Recipe (each wins over the file)", "Samples", "Output"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local directory, safetensors file, or Hub id.")]
Calib = Annotated[
    list[str],
    typer.Option(
        "--calib",
        metavar="DATA",
        rich_help_panel=_DATA,
        help="Unlabelled samples: a folder, a .txt/.jsonl/.csv/.parquet/.tar file, or hf:NAME[:SPLIT[:SLICE]]. "
        "Twice, images and texts, for a model with a tower for each.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", rich_help_panel=_RECIPE, help="Recipe as YAML; see configs/."),
]
Ratio = Annotated[
    float | None,
    typer.Option("--ratio", rich_help_panel=_RECIPE, help="Share of eligible sites to convert. [0.67]"),
]
Count = Annotated[int | None, typer.Option("-k", rich_help_panel=_RECIPE, help="Number of sites to convert.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        rich_help_panel=_RECIPE,
        help="Only these sites are candidates: whole dotted parts, e.g. 'layer.1' or 'vision_*'. Repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", rich_help_panel=_RECIPE, help="These sites stay exact. Repeatable."),
]
Towers = Annotated[
    list[str] | None,
    typer.Option(
        "--towers",
        metavar="TOWER",
        rich_help_panel=_RECIPE,
        help="Only this tower: vision, text, audio, encoder or decoder. Repeatable. [all]",
    ),
]
Heads = Annotated[
    Granularity | None,
    typer.Option("--granularity", rich_help_panel=_RECIPE, help="Kernel scalars per layer or head."),
]
MinTokens = Annotated[
    int | None,
    typer.Option("--min-tokens", rich_help_panel=_RECIPE, help="With fewer keys a site runs exact attention. [0]"),
]
Propagate = Annotated[
    bool | None,
    typer.Option(
        "--propagate-error/--no-propagate-error",
        rich_help_panel=_RECIPE,
        help="Refit the chosen sites on the inputs they get behind converted ones. Slower.",
    ),
]
MinFidelity = Annotated[
    float | None,
    typer.Option(
        "--min-fidelity",
        rich_help_panel=_RECIPE,
        help="Lowest accepted held-out cosine of the final output; exit code 4 below it.",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", rich_help_panel=_DATA, help="Samples to use, held-out ones included. [32]"),
]
MinSamples = Annotated[
    int | None,
    typer.Option("--min-samples", rich_help_panel=_DATA, help="Fewer usable samples are an error. [2]"),
]
Resolution = Annotated[
    int | None,
    typer.Option("--resolution", rich_help_panel=_DATA, help="Image size in pixels. [the checkpoint's own]"),
]
Seed = Annotated[int | None, typer.Option("--seed", rich_help_panel=_DATA, help="Seed of the choice of samples. [0]")]
Strict = Annotated[
    bool | None,
    typer.Option("--strict/--no-strict", rich_help_panel=_DATA, help="The first unusable sample is an error."),
]
Device = Annotated[str, typer.Option("--device", rich_help_panel=_MODEL, help="auto, cpu, cuda, cuda:1, mps.")]
Revision = Annotated[
    str | None,
    typer.Option("--revision", rich_help_panel=_MODEL, help="Branch, tag or commit of a Hub model."),
]
Pickle = Annotated[
    bool,
    typer.Option("--allow-pickle", rich_help_panel=_MODEL, help="Accept pytorch_model.bin (weights-only unpickling)."),
]
Remote = Annotated[
    bool,
    typer.Option("--trust-remote-code", rich_help_panel=_MODEL, help="Run Python code of the checkpoint."),
]
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=_OUTPUT, help="Print the report as one JSON document on stdout."),
]


def convert(
    model: Model,
    calib: Calib,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", rich_help_panel=_OUTPUT, help="Artifact to create."),
    ] = None,
    config: Config = None,
    ratio: Ratio = None,
    k: Count = None,
    towers: Towers = None,
    include: Include = None,
    exclude: Exclude = None,
    granularity: Heads = None,
    min_tokens: MinTokens = None,
    propagate_error: Propagate = None,
    min_fidelity: MinFidelity = None,
    samples: Samples = None,
    min_samples: MinSamples = None,
    resolution: Resolution = None,
    seed: Seed = None,
    strict: Strict = None,
    device: Device = "auto",
    revision: Revision = None,
    allow_pickle: Pickle = False,
    trust_remote_code: Remote = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=_OUTPUT, help="Replace an existing --out.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=_OUTPUT, help="Fit, score and print the plan; convert nothing."),
    ] = False,
    json: Json = False,
) -> None:
    """Calibrate, score, select, rewrite, measure, and save a hybrid checkpoint with its report.

    Example: latte convert facebook/dinov2-small --calib photos/ --out dinov2-hybrid
    """
    from latte_convert.errors import UsageError

    if out is None and not dry_run:
        raise UsageError("give --out DIR for the artifact, or --dry-run to see the plan only.")
    recipe = _recipe(config, locals())
    options = _options(device, revision, allow_pickle, trust_remote_code)
    if dry_run:
        _show_plan(_score(model, calib, recipe, options), json)
        return
    from latte_convert.artifact.files import check_target
    from latte_convert.conversion import convert as run

    assert out is not None
    check_target(out, overwrite=overwrite, protect=[Path(place).expanduser() for place in (model, *calib)])
    with console.log_to_stderr(), console.progress() as progress:
        outcome = run(model, calib, recipe=recipe, progress=progress, **options)
        console.heed_interrupt()
        outcome.save(out, overwrite=overwrite)
    report = outcome.report
    _warn(report)
    console.site_table(report)
    console.fidelity_table(report)
    console.note(f"report: {out / 'report.html'}")
    if json:
        console.document(report.model_dump(mode="json"))
    else:
        console.result(str(out))


def score(
    model: Model,
    calib: Calib,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            rich_help_panel=_OUTPUT,
            help="Write the report as .json, or as a page with the plot as .html.",
        ),
    ] = None,
    config: Config = None,
    ratio: Ratio = None,
    k: Count = None,
    towers: Towers = None,
    include: Include = None,
    exclude: Exclude = None,
    granularity: Heads = None,
    samples: Samples = None,
    min_samples: MinSamples = None,
    resolution: Resolution = None,
    seed: Seed = None,
    strict: Strict = None,
    device: Device = "auto",
    revision: Revision = None,
    allow_pickle: Pickle = False,
    trust_remote_code: Remote = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=_OUTPUT, help="Replace an existing --out.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure how sensitive every attention site is to linear attention. Writes no model.

    Example: latte score facebook/dinov2-small --calib photos/ --out scores.html
    """
    from latte_convert.errors import UsageError

    if out is not None and out.suffix not in (".json", ".html"):
        raise UsageError(f"--out takes a .json or .html file, not '{out.name}'.")
    if out is not None:
        from latte_convert.report.write import check_report_target, write_report

        check_report_target(out, overwrite=overwrite)
    recipe = _recipe(config, locals())
    report = _score(model, calib, recipe, _options(device, revision, allow_pickle, trust_remote_code))
    if out is not None:
        write_report(report, out)
    _show_plan(report, json)


_SETTINGS = (
    "ratio",
    "k",
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


def _recipe(config: Path | None, given: dict[str, Any]) -> Recipe:
    """The recipe file with the options that were given on the command line."""
    from latte_convert.recipe import Recipe

    values = {key: given[key] for key in _SETTINGS if given.get(key) not in (None, [])}
    if isinstance(values.get("granularity"), Granularity):
        values["granularity"] = values["granularity"].value
    if "ratio" in values and "k" not in values:
        values["k"] = None  # --ratio on the command line wins over k in the file
    if config is None:
        return Recipe.build(values, origin="options")
    return Recipe.from_yaml(config, **values)


def _options(device: str, revision: str | None, allow_pickle: bool, trust_remote_code: bool) -> dict[str, Any]:
    return {
        "device": device,
        "revision": revision,
        "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
    }


def _score(model: str, calib: list[str], recipe: Recipe, options: dict[str, Any]) -> Report:
    from latte_convert.conversion import score as run

    with console.log_to_stderr(), console.progress() as progress:
        return run(model, calib, recipe=recipe, progress=progress, **options)


def _show_plan(report: Report, json: bool) -> None:
    _warn(report)
    console.site_table(report)
    console.note(f"the recipe converts {len(report.converted)} of {len(report.sites)} sites; nothing was converted.")
    if json:
        console.document(report.model_dump(mode="json"))
        return
    for name in report.converted:
        console.result(name)


def _warn(report: Report) -> None:
    for warning in report.warnings:
        console.note(f"warning: {warning}")
