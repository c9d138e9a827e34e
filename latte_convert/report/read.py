"""Read reports back: that of an artifact with what bench and eval have added since, or a report.json by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from latte_convert.bench.result import BenchReport
from latte_convert.errors import InputError
from latte_convert.evaluation.result import EvalReport
from latte_convert.names import BENCH, EVALUATIONS, REPORT
from latte_convert.report.schema import Report

_M = TypeVar("_M", bound=BaseModel)
_A = TypeVar("_A", BenchReport, EvalReport)


def read_report(path: Path) -> Report:
    """The report of an artifact, joined by its ``bench.json`` and its ``eval*.json``; or one report file as it is.

    Args:
        path: The artifact's directory, or a ``.json`` file.

    Raises:
        InputError: There is no report, it cannot be read, follows another version of the schema, or is of
            another model.
    """
    if not path.is_dir():
        return _read(path, Report)
    report = _read(path / REPORT, Report)
    added: dict[str, Any] = {}
    if (path / BENCH).exists():
        added["bench"] = _of(report, path / BENCH, BenchReport)
    evaluations = [_of(report, file, EvalReport) for file in sorted(path.glob(EVALUATIONS))]
    if evaluations:
        added["evaluations"] = evaluations
    return report.model_copy(update=added)


def _of(report: Report, path: Path, kind: type[_A]) -> _A:
    """What was measured of the artifact that ``report`` is of."""
    found = _read(path, kind)
    if found.source != report.source.id:
        raise InputError(
            f"{path} is of a hybrid of '{found.source}', this artifact is one of '{report.source.id}'. Remove the "
            "file, or measure this artifact."
        )
    return found


def _read(path: Path, kind: type[_M]) -> _M:
    known = kind.model_fields["schema_version"].default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"there is no {path}. Give the directory of an artifact that 'latte convert' wrote, or its report.json."
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, not UTF-8, or a huge number
        raise InputError(f"{path} cannot be read as JSON: {error}.") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version is None:
        raise InputError(f"{path} is not a report of latte: it has no schema_version.")
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
