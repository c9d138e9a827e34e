"""``latte report``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latte_convert.cli import console, options
from latte_convert.wording import some

if TYPE_CHECKING:
    from latte_convert.report.schema import Report

_COMPARE = "Comparison for CI"


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Artifacts, or report.json files. Several are shown side by side."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            rich_help_panel=options.OUTPUT,
            help="The page to write, with its .json for one artifact; DIR/report.html, or ./report.html of several.",
        ),
    ] = None,
    plots: Annotated[
        bool,
        typer.Option("--plots", rich_help_panel=options.OUTPUT, help="Write the charts of one artifact as PNG, too."),
    ] = False,
    overwrite: options.Overwrite = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            rich_help_panel=_COMPARE,
            help="OLD NEW: print what changed as JSON and write no page; exit code 4 if fidelity, retention or FLOPs "
            "got worse.",
        ),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            min=0,
            rich_help_panel=_COMPARE,
            help="How much worse a number may get before it is a regression.",
        ),
    ] = 0.005,
    json: options.Json = False,
) -> None:
    """Rebuild the report of an artifact with what bench and eval have added, or show several side by side.

    It reads report.json, bench.json and eval*.json ('latte eval ... --out DIR/eval-knn.json') and runs no model.
    """
    with console.log_to_stderr():
        if compare:
            _compare(paths, tolerance, page=out is not None or plots)
            return
        written = _one(paths[0], out, plots, overwrite) if len(paths) == 1 else _several(paths, out, plots, overwrite)
    if json:
        console.document({"written": [str(path) for path in written]})
    else:
        for path in written:
            console.result(str(path))


def _compare(paths: list[Path], tolerance: float, *, page: bool) -> None:
    from latte_convert.errors import GateError, InputError, UsageError
    from latte_convert.report.compare import compare
    from latte_convert.report.read import read_report

    if len(paths) != 2:
        raise UsageError(f"--compare takes two reports, OLD and NEW, not {len(paths)}.")
    if not math.isfinite(tolerance):
        raise UsageError(f"--tolerance takes a share of 0 or more, such as 0.005, not {tolerance}.")
    if page:
        raise UsageError("--compare writes no page: leave out --out and --plots, and redirect its JSON into a file.")
    before, after = map(read_report, paths)
    classes = [report.source.model_class for report in (before, after)]
    if len(set(classes)) > 1:
        raise InputError(
            f"{paths[0]} is of a {classes[0]} and {paths[1]} of a {classes[1]}: --compare takes two hybrids of one "
            "model. 'latte report' without it shows any side by side."
        )
    found = compare(before, after, tolerance=tolerance, old_path=str(paths[0]), new_path=str(paths[1]))
    console.document(found.model_dump(mode="json"))
    if not found.ok:
        raise GateError(
            f"{len(found.regressions)} of {len(found.changes)} numbers are worse than before by more than {tolerance}: "
            f"{some(found.regressions)}."
        )


def _one(path: Path, out: Path | None, plots: bool, overwrite: bool) -> list[Path]:
    from latte_convert.report.plots import plot_paths, write_plots
    from latte_convert.report.read import read_report
    from latte_convert.report.write import check_report_target, write_report

    target = _target(
        out, path / "report.html" if path.is_dir() else path.with_suffix(".html"), overwrite or out is None
    )
    data = target.with_suffix(".json")
    check_report_target(data, overwrite=overwrite or out is None)
    report = read_report(path)
    _check_kept(path, data, report)
    for file in plot_paths(report, target.parent, target.stem) if plots and out is not None else ():
        check_report_target(file, overwrite=overwrite)
    for file in (target, data):
        write_report(report, file)
    if path.is_dir():
        _renew_card(path, report)
        console.next_step(report, path)
    return [target, data, *(write_plots(report, target.parent, target.stem) if plots else [])]


def _renew_card(path: Path, report: Report) -> None:
    """Write the model card of an artifact anew, with what bench and eval have added; an older one has none."""
    from latte_convert.artifact.card import card_text
    from latte_convert.artifact.manifest import read_manifest
    from latte_convert.artifact.results import write_text
    from latte_convert.names import CARD, MANIFEST, ORIGINAL
    from latte_convert.report.card import measured

    if (path / MANIFEST).is_file() and CARD not in (manifest := read_manifest(path)).files:
        base = path / ORIGINAL / CARD
        text = card_text(manifest, base if base.is_file() else None, measured(report))
        write_text(text, path / CARD)


def _check_kept(path: Path, data: Path, report: Report) -> None:
    """Refuse to overwrite results that only the artifact's report holds."""
    from latte_convert.errors import OutputError
    from latte_convert.names import REPORT
    from latte_convert.report.read import only_embedded

    if not (path.is_dir() and data.resolve() == (path / REPORT).resolve()):
        return
    if lost := only_embedded(path, report):
        raise OutputError(
            f"{data} alone holds results that would be lost ({some(lost, separator='; ')}): "
            "they were measured on another artifact, or their own file is gone. Write the page elsewhere with --out, "
            "or measure them again with 'latte bench --save' or 'latte eval --out'."
        )


def _several(paths: list[Path], out: Path | None, plots: bool, overwrite: bool) -> list[Path]:
    from latte_convert.artifact.results import write_text
    from latte_convert.errors import UsageError
    from latte_convert.report.html import render_comparison
    from latte_convert.report.read import read_report

    if plots:
        raise UsageError("--plots is for one artifact: run 'latte report DIR --plots' for each.")
    names = _names(paths)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"'{twice}' is given twice: give each artifact once.")
    target = _target(out, Path("report.html"), overwrite)
    page = render_comparison({name: read_report(path) for name, path in zip(names, paths, strict=True)})
    write_text(page, target)
    return [target]


def _target(out: Path | None, default: Path, overwrite: bool) -> Path:
    from latte_convert.errors import UsageError
    from latte_convert.report.write import check_report_target

    target = out or default
    if target.suffix != ".html":
        raise UsageError(f"--out takes an .html file, not '{target.name}'.")
    check_report_target(target, overwrite=overwrite)
    return target


def _names(paths: list[Path]) -> list[str]:
    """A short name for each artifact: its directory's, or the path where two would be alike."""
    short = [(path if path.is_dir() else path.parent).resolve().name for path in paths]
    alike = len(set(short)) < len(short)
    return [str(path) for path in paths] if alike else short
