"""Read reports back: an artifact's, joined with the results of bench and eval, or a single report.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from latte_convert.artifact.manifest import read_manifest
from latte_convert.artifact.results import check_result
from latte_convert.bench.result import BenchReport
from latte_convert.errors import InputError
from latte_convert.evaluation.result import EvalReport
from latte_convert.names import BENCH, EVALUATIONS, MANIFEST, REPORT
from latte_convert.reading import read_json
from latte_convert.report.schema import Report

logger = logging.getLogger("latte_convert")

_M = TypeVar("_M", bound=BaseModel)
_A = TypeVar("_A", BenchReport, EvalReport)

RESULTS: dict[str, type[BenchReport | EvalReport]] = {BENCH: BenchReport, EVALUATIONS: EvalReport}
"""What the results beside a report hold, by the pattern of their names."""


def read_report(path: Path) -> Report:
    """The report of an artifact, joined by its ``bench.json`` and its ``eval*.json``; or one report file, unchanged.

    What was measured on another artifact than the one it lies in is left out, with a warning.

    Args:
        path: The artifact's directory, or a ``.json`` file.

    Raises:
        InputError: There is no report, it cannot be read, it follows another version of the schema, or it is a
            ``report.json`` of another artifact than the one it lies in.
        IntegrityError: The artifact has no manifest that can be read, or a file is not the one that it records.
    """
    if path.name == REPORT or not path.is_dir():
        return _own_report(path)
    report = _own_report(path / REPORT)
    benches, evaluations = (sorted(path.glob(pattern)) for pattern in RESULTS)
    if not benches and not evaluations and not (path / MANIFEST).exists():
        return report  # kept without its artifact, as CI keeps the last one
    manifest = read_manifest(path)
    fingerprint = manifest.fingerprint
    foreign: list[Path] = []

    def own(files: list[Path], kind: type[_A], earlier: list[_A]) -> list[_A]:
        """Results in the files beside the report, or else those that the report holds already."""
        for found in (
            [(file, _read_kept(file, kind)) for file in files],
            [(path / REPORT, result) for result in earlier],
        ):
            foreign.extend(file for file, result in found if result.artifact_fingerprint != fingerprint)
            if ours := [result for _, result in found if result.artifact_fingerprint == fingerprint]:
                return ours
        return []

    bench = own(benches, BenchReport, [report.bench] if report.bench else [])
    joined = {
        "bench": bench[0] if bench else None,
        "min_tokens": manifest.min_tokens,
        "evaluations": own(evaluations, EvalReport, report.evaluations or []) or None,
    }
    for file in dict.fromkeys(foreign):
        logger.warning(
            "a result in %s was measured on another artifact, or does not say on which, and is left out. Measure this "
            "artifact with 'latte bench --save' or 'latte eval --out'.",
            file,
        )
    return report.model_copy(update=joined)


def only_embedded(directory: Path, report: Report) -> list[str]:
    """What the ``report.json`` of an artifact alone holds, and ``report`` does not: lost if that took its place.

    A result is not lost where a newer one of the same kind, task and data is in ``report``.

    Returns:
        Names of the results.

    Raises:
        InputError: A file cannot be read.
    """
    files = {file: kind for pattern, kind in RESULTS.items() for file in directory.glob(pattern)}
    kept = [read(file, kind) for file, kind in files.items()]
    newer = {_name(result) for result in _results(report)}
    old = _results(read(directory / REPORT, Report))
    return [_name(result) for result in old if result not in kept and _name(result) not in newer]


def _results(report: Report) -> list[BenchReport | EvalReport]:
    return [*([report.bench] if report.bench else []), *(report.evaluations or [])]


def _name(result: BenchReport | EvalReport) -> str:
    return f"{result.task} on {', '.join(result.data)}" if isinstance(result, EvalReport) else "bench"


def _own_report(path: Path) -> Report:
    """A report file; a ``report.json`` beside a manifest must be of that artifact, where it says of which it is."""
    report = _read_kept(path, Report)
    manifest = path.parent / MANIFEST
    if path.name != REPORT or report.artifact_fingerprint is None or not manifest.exists():
        return report
    if report.artifact_fingerprint != read_manifest(path.parent).fingerprint:
        raise InputError(
            f"{path} is of another artifact than the {MANIFEST} beside it. Put this artifact's own {REPORT} back, or "
            "convert again."
        )
    return report


def _read_kept(path: Path, kind: type[_M]) -> _M:
    """A document, which in an artifact must be the one that was written there.

    Raises:
        InputError: See ``read``.
        IntegrityError: It was changed since.
    """
    found = read(path, kind)
    check_result(path)
    return found


def read(path: Path, kind: type[_M]) -> _M:
    """A document of one kind, strictly.

    Raises:
        InputError: It is absent or unreadable, of another kind, or follows another version of its schema.
    """
    known = kind.model_fields["schema_version"].default
    content = read_json(
        path,
        InputError,
        absent=f"there is no {path}. Give the directory of an artifact that 'latte convert' wrote, or its report.json.",
    )
    version = content.get("schema_version") if isinstance(content, dict) else None
    if type(version) is not int:
        what = "it has no schema_version" if version is None else "its schema_version is not a whole number"
        raise InputError(f"{path} is not a report of latte: {what}.")
    if version != known:
        raise InputError(
            f"{path} follows version {version} of the schema; this latte_convert reads version {known}. Read it with "
            "the version that wrote it, or convert again."
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is not a report of this kind: {place}: {first['msg']}.") from None
