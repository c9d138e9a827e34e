"""``latte score`` and ``latte convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latte_convert.cli import console, options

if TYPE_CHECKING:
    from latte_convert.report.schema import Report


def convert(
    model: options.Model,
    calib: options.Calib,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", rich_help_panel=options.OUTPUT, help="Artifact to create."),
    ] = None,
    config: options.Config = None,
    kernel: options.KernelName = None,
    option: options.KernelOption = None,
    scorer: options.ScorerName = None,
    ratio: options.Ratio = None,
    k: options.Count = None,
    max_flops: options.MaxFlops = None,
    target_speedup: options.Speedup = None,
    towers: options.Towers = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    granularity: options.Heads = None,
    min_tokens: options.MinTokens = None,
    propagate_error: options.Propagate = None,
    min_fidelity: options.MinFidelity = None,
    samples: options.Samples = None,
    min_samples: options.MinSamples = None,
    resolution: options.Resolution = None,
    seed: options.Seed = None,
    strict: options.Strict = None,
    device: options.Device = "auto",
    revision: options.Revision = None,
    allow_pickle: options.Pickle = False,
    trust_remote_code: options.Remote = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=options.OUTPUT, help="Replace an existing --out.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", rich_help_panel=options.OUTPUT, help="Fit, score and print the plan; convert nothing."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Calibrate, score, select, rewrite, measure, and save a hybrid checkpoint with its report.

    Example: latte convert facebook/dinov2-small --calib photos/ --out dinov2-hybrid
    """
    from latte_convert.errors import UsageError

    if out is None and not dry_run:
        raise UsageError("give --out DIR for the artifact, or --dry-run to see the plan only.")
    arguments = options.arguments(locals())
    if dry_run:
        _show_plan(_score(model, calib, **arguments), json)
        return
    from latte_convert.artifact.files import check_target
    from latte_convert.conversion import convert as run

    assert out is not None
    check_target(out, overwrite=overwrite, protect=[Path(place).expanduser() for place in (model, *calib)])
    with console.log_to_stderr(), console.progress() as progress:
        outcome = run(model, calib, progress=progress, **arguments)
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
    model: options.Model,
    calib: options.Calib,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            rich_help_panel=options.OUTPUT,
            help="Write the report as .json, or as a page with the plot as .html.",
        ),
    ] = None,
    config: options.Config = None,
    kernel: options.KernelName = None,
    option: options.KernelOption = None,
    scorer: options.ScorerName = None,
    ratio: options.Ratio = None,
    k: options.Count = None,
    max_flops: options.MaxFlops = None,
    target_speedup: options.Speedup = None,
    towers: options.Towers = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    granularity: options.Heads = None,
    min_tokens: options.MinTokens = None,
    min_fidelity: options.MinFidelity = None,
    samples: options.Samples = None,
    min_samples: options.MinSamples = None,
    resolution: options.Resolution = None,
    seed: options.Seed = None,
    strict: options.Strict = None,
    device: options.Device = "auto",
    revision: options.Revision = None,
    allow_pickle: options.Pickle = False,
    trust_remote_code: options.Remote = False,
    stripes: Annotated[
        bool,
        typer.Option(
            "--stripes",
            rich_help_panel=options.OUTPUT,
            help="Report the stripes of every head: keys that all attend to, queries that attend everywhere.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=options.OUTPUT, help="Replace an existing --out.")
    ] = False,
    json: options.Json = False,
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
    report = _score(model, calib, stripes=stripes, **options.arguments(locals()))
    if out is not None:
        write_report(report, out)
    _show_plan(report, json)


def _score(model: str, calib: list[str], **arguments: Any) -> Report:
    from latte_convert.conversion import score as run

    with console.log_to_stderr(), console.progress() as progress:
        return run(model, calib, progress=progress, **arguments)


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
