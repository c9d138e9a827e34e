"""Read reports back: that of an artifact with what bench and eval have added since, or a report.json by itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from latte_convert.artifact.manifest import read_manifest
from latte_convert.bench.result import BenchReport
from latte_convert.errors import InputError
from latte_convert.evaluation.result import EvalReport
from latte_convert.names import BENCH, EVALUATIONS, MANIFEST, REPORT
from latte_convert.report.schema import Report

logger = logging.getLogger("latte_convert")

_M = TypeVar("_M", bound=BaseModel)
_A = TypeVar("_A", BenchReport, EvalReport)


def read_report(path: Path) -> Report:
    """The report of an artifact, joined by its ``bench.json`` and its ``eval*.json``; or one report file as it is.

    What was measured on another artifact than the one it lies in is left out, with a warning.

    Args:
        path: The artifact's directory, or a ``.json`` file.

    Raises:
        InputError: There is no report, it cannot be read, or it follows another version of the schema.
        IntegrityError: The artifact has no manifest that can be read.
    """
    if not path.is_dir():
        return _read(path, Report)
    report = _read(path / REPORT, Report)
    benches, evaluations = (sorted(path.glob(pattern)) for pattern in (BENCH, EVALUATIONS))
    if not benches and not evaluations and not (path / MANIFEST).exists():
        return report  # kept without its artifact, as CI keeps the last one
    fingerprint = read_manifest(path).fingerprint

    def own(files: list[Path], kind: type[_A], earlier: list[_A]) -> list[_A]:
        """By the files beside the report; where none is of this artifact, by what the report holds already."""
        found = _own([(file, _read(file, kind)) for file in files], fingerprint)
        return found or _own([(path / REPORT, result) for result in earlier], fingerprint)

    bench = own(benches, BenchReport, [report.bench] if report.bench else [])
    return report.model_copy(
        update={
            "bench": bench[0] if bench else None,
            "evaluations": own(evaluations, EvalReport, report.evaluations or []) or None,
        }
    )


def _own(results: Iterable[tuple[Path, _A]], fingerprint: str) -> list[_A]:
    """The results that were measured on the artifact with this fingerprint; the others are warned of."""
    own = []
    for file, result in results:
        if result.artifact_fingerprint == fingerprint:
            own.append(result)
            continue
        logger.warning(
            "a result in %s was measured on another artifact, or does not say on which, and is left out. Remove it, "
            "or measure this artifact with 'latte bench --save' or 'latte eval'.",
            file,
        )
    return own


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
