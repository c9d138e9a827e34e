"""Write a report on its own: JSON for machines, HTML for people."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel

from latte_convert.artifact.files import check_place, write_json
from latte_convert.artifact.manifest import read_manifest
from latte_convert.artifact.results import write_document, write_files
from latte_convert.bench.result import BenchReport
from latte_convert.errors import InputError, OutputError
from latte_convert.evaluation.result import EvalReport
from latte_convert.names import MANIFEST, REPORT
from latte_convert.report.html import write_html
from latte_convert.report.read import read
from latte_convert.report.schema import Report

KINDS: dict[type[BaseModel], str] = {
    Report: "the report of a conversion",
    EvalReport: "what 'latte eval' measured",
    BenchReport: "what 'latte bench' measured",
}


def check_report_target(path: Path, *, overwrite: bool, kind: type[BaseModel] = Report) -> None:
    """Refuse a report file that could not be written, or would destroy something, before any work is done for it.

    Args:
        path: The file to write.
        overwrite: Whether it may replace a file outside of artifacts.
        kind: What it will hold; a report of another kind is never replaced.

    Raises:
        OutputError: It exists and may not be replaced, it is a directory, or lies where nothing can be written.
        IntegrityError: It lies in an artifact whose manifest cannot be read.
    """
    check_place(path)
    if path.is_dir():
        raise OutputError(f"{path} is a directory; give a .json or .html file.")
    if _is_part_of_artifact(path):
        raise OutputError(f"{path} is part of the artifact it lies in, which would be destroyed. Choose another --out.")
    if held := next((text for other, text in KINDS.items() if other is not kind and _is_a(path, other)), None):
        raise OutputError(f"{path} holds {held}, which would be lost. Choose another --out.")
    if os.path.lexists(path) and not overwrite:
        raise OutputError(f"{path} exists already. Choose another --out, or pass --overwrite to replace it.")


def _is_part_of_artifact(path: Path) -> bool:
    """Whether a path is the manifest of an artifact, or a file that the manifest names."""
    place = path.parent.resolve() / path.name  # a link is replaced, not what it leads to
    home = next((folder for folder in place.parents if os.path.isfile(folder / MANIFEST)), None)
    if home is None:
        return False
    name = place.relative_to(home).as_posix()
    return name == MANIFEST or name in read_manifest(home).files


def _is_a(path: Path, kind: type[BaseModel]) -> bool:
    if path.suffix != ".json":
        return False
    try:
        read(path, kind)
    except InputError:
        return False
    return True


def write_report(report: Report, path: Path) -> None:
    """Write a report as ``.json`` or ``.html``, whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    if path.suffix == ".html":
        write_files({path: lambda temporary: write_html(report, temporary)})
    else:
        write_document(report.model_dump(mode="json"), path)


def write_reports(report: Report, directory: Path) -> None:
    """Write a report into an artifact that is being made, for machines and for people."""
    write_json(directory / REPORT, report.model_dump(mode="json"))
    write_html(report, directory / "report.html")
