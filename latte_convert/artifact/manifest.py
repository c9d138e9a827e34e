"""``latte.json``: what a checkpoint records of itself. It holds no times, so equal conversions give equal files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latte_convert.adapters.checkpoint import MANIFEST
from latte_convert.errors import IntegrityError

MANIFEST_VERSION = 1
"""Newest ``schema_version`` that this version reads."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SourceRecord(_Model):
    """Provenance of the original."""

    id: str
    revision: str | None
    library: str
    model_class: str
    sha256: dict[str, str] = Field(description="SHA-256 of each weight file of the source.")
    tensors_sha256: str = Field(description="SHA-256 over key, dtype, shape and bytes of the source's tensors, sorted.")
    unexpected_keys: list[str] = Field(description="Source tensors that the model class has no place for.")


class SiteRecord(_Model):
    """One converted site, enough to build its kernel."""

    name: str
    kernel: str
    heads: int
    head_dim: int
    causal: bool
    options: dict[str, Any]


class CalibrationRecord(_Model):
    """The samples the fit rests on."""

    fingerprint: str
    requested: int
    used: int
    held_out: int
    skipped: list[dict[str, str]]


class ProbeRecord(_Model):
    """A seeded random input and what the hybrid made of it, so that ``verify`` can run the model without data."""

    seed: int
    inputs: dict[str, dict[str, Any]]
    method: str
    output: str
    values: list[float]
    scale: float = Field(description="Root mean square of the output, the unit of the tolerance.")


class Manifest(_Model):
    """Contents of ``latte.json``."""

    schema_version: Literal[1] = 1
    tool_version: str
    library_versions: dict[str, str]
    source: SourceRecord
    recipe: dict[str, Any]
    calibration: CalibrationRecord
    sites: list[SiteRecord]
    min_tokens: int
    probe: ProbeRecord | None
    files: dict[str, str] = Field(description="SHA-256 of every other file of the artifact except the reports.")


def read_manifest(directory: Path) -> Manifest:
    """Read and check ``latte.json``.

    Raises:
        IntegrityError: It is absent, damaged, or of a version this tool does not know.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IntegrityError(f"{directory} is not an artifact of latte: it has no {MANIFEST}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise IntegrityError(f"{path} is damaged: {error}. Convert again, or get the file anew.") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise IntegrityError(
            f"{path} has schema version {version}; this version of latte_convert reads up to {MANIFEST_VERSION}. "
            "Upgrade with 'pip install -U latte-convert'."
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise IntegrityError(f"{path}: {where}: {first['msg']}. The manifest was changed or cut short.") from None
