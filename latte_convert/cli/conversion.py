"""``latte score`` and ``latte convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latte_convert import processes
from latte_convert.cli import console, interrupts, options
from latte_convert.errors import UsageError
from latte_convert.names import PAGE
from latte_convert.recipe import Recipe

if TYPE_CHECKING:
    from latte_convert.report.schema import Report


@options.takes_recipe
def convert(
    calib: options.Calib,
    model: options.Model = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", rich_help_panel=options.OUTPUT, help="Artifact to create."),
    ] = None,
    overwrite: options.Overwrite = False,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            rich_help_panel=options.OUTPUT,
            help="Write only what was converted, beside a pinned reference to MODEL; 'latte merge' puts them together.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", rich_help_panel=options.OUTPUT, help="Fit, score and print the plan; convert nothing."
        ),
    ] = False,
    sites_from: Annotated[
        Path | None,
        typer.Option(
            "--sites-from",
            metavar="REPORT",
            rich_help_panel="Which sites are converted",
            help="Convert the sites of a report.json, or of an artifact, with their kernels fitted to MODEL; nothing "
            "is scored or chosen.",
        ),
    ] = None,
    work: options.Work = None,
    offload: options.Offload = None,
    json: options.Json = False,
    device: options.Device = "auto",
    revision: options.Revision = None,
    allow_pickle: options.Pickle = False,
    trust_remote_code: options.Remote = False,
    model_factory: options.Factory = None,
    *,
    recipe: Recipe,
) -> None:
    """Calibrate, score, select, rewrite, measure, and save a hybrid checkpoint with its report.

    Example: latte convert facebook/dinov2-small --calib photos/ --out dinov2-hybrid
    """
    if out is None and not dry_run:
        raise UsageError("give --out DIR for the artifact, or --dry-run to see the plan only.")
    if sites_from is not None and dry_run:
        raise UsageError("--sites-from names the plan: there is none to show with --dry-run. Leave one of them out.")
    if adapter and allow_pickle:
        raise UsageError("--adapter takes a model with safetensors files: leave out --allow-pickle.")
    loading: dict[str, Any] = {
        "device": device,
        "revision": revision,
        "allow_pickle": allow_pickle,
        "trust_remote_code": trust_remote_code,
        "model_factory": model_factory,
        "work": work,
        "offload": offload,
    }
    if dry_run:
        report = _score(model, calib, recipe=recipe, **loading)
        processes.finish()
        _show_plan(report, json)
        return
    from latte_convert.artifact.files import check_outside, check_target
    from latte_convert.conversion import convert as run

    assert out is not None
    given = [Path(place).expanduser() for place in (model, *calib) if place is not None]
    if model is not None:
        check_outside(out, given[0])
    check_target(out, overwrite=overwrite, protect=given)
    processes.join()
    with console.log_to_stderr(), console.progress() as progress:
        outcome = run(model, calib, recipe=recipe, sites_from=sites_from, progress=progress, **loading)
        interrupts.heed()
        if processes.rank() == 0:
            outcome.save(out, overwrite=overwrite, adapter=adapter)
        processes.finish()
    report = outcome.report
    _warn(report)
    console.site_table(report)
    console.fidelity_table(report)
    console.note(f"report: {out / PAGE}")
    console.next_step(report, out)
    if json:
        console.document(report.model_dump(mode="json"))
    else:
        console.result(str(out))


@options.takes_recipe
def score(
    calib: options.Calib,
    model: options.Model = None,
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
    overwrite: options.Overwrite = False,
    stripes: Annotated[
        bool,
        typer.Option(
            "--stripes",
            rich_help_panel=options.OUTPUT,
            help="Report the stripes of every head: keys that all attend to, queries that attend everywhere.",
        ),
    ] = False,
    work: options.Work = None,
    offload: options.Offload = None,
    json: options.Json = False,
    device: options.Device = "auto",
    revision: options.Revision = None,
    allow_pickle: options.Pickle = False,
    trust_remote_code: options.Remote = False,
    model_factory: options.Factory = None,
    *,
    recipe: Recipe,
) -> None:
    """Measure how sensitive every attention site is to linear attention. Writes no model.

    Example: latte score facebook/dinov2-small --calib photos/ --out scores.html
    """
    if out is not None:
        from latte_convert.report.write import check_report_target, write_report

        if out.suffix not in (".json", ".html"):
            raise UsageError(f"--out takes a .json or .html file, not '{out.name}'.")
        check_report_target(out, overwrite=overwrite)
    report = _score(
        model,
        calib,
        recipe=recipe,
        stripes=stripes,
        work=work,
        offload=offload,
        device=device,
        revision=revision,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        model_factory=model_factory,
    )
    if out is not None and processes.rank() == 0:
        write_report(report, out)
    processes.finish()
    _show_plan(report, json)


def _score(model: str | None, calib: list[str], **arguments: Any) -> Report:
    from latte_convert.conversion import score as run

    processes.join()
    with console.log_to_stderr(), console.progress() as progress:
        return run(model, calib, progress=progress, **arguments)


def _show_plan(report: Report, json: bool) -> None:
    _warn(report)
    console.site_table(report)
    console.note(f"the recipe: {report.made}; nothing was converted.")
    if json:
        console.document(report.model_dump(mode="json"))
        return
    for name in report.converted:
        console.result(name)


def _warn(report: Report) -> None:
    for warning in report.warnings:
        console.alert(f"warning: {warning}")
