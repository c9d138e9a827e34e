"""``latte.json``: what a checkpoint records of itself. It holds no times, so equal conversions give equal files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from latte_convert.errors import IntegrityError
from latte_convert.names import FACTORY, MANIFEST
from latte_convert.reading import read_json

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
    heads: int = Field(ge=1, le=4096)
    head_dim: int = Field(ge=1, le=65536)
    causal: bool
    biased: bool = Field(False, description="Whether something is added to its logits.")
    options: dict[str, Any]


class MergeRecord(_Model):
    """One block whose tokens are merged."""

    name: str
    share: float = Field(gt=0, le=1, description="Share of the tokens behind the prefix that the block works on.")


class ModuleRecord(_Model):
    """A module that no library builds: what ``load`` needs besides the artifact."""

    kind: str = Field(description="Import path of its class, package.module:Class.")
    factory: str | None = Field(
        pattern=f"^{FACTORY}$", description="Import path of a function that builds it, package.module:function."
    )
    attention: list[str] = Field(
        default_factory=list, description="Everything in it that was seen to compute attention, converted or not."
    )


class CalibrationRecord(_Model):
    """The samples the fit rests on."""

    fingerprint: str
    requested: int
    used: int
    held_out: int
    skipped: list[dict[str, str]]


class ProbeRecord(_Model):
    """A seeded random input and what the hybrid made of it, so that ``verify`` can run the model without data."""

    seed: int = Field(ge=0, lt=2**63)
    inputs: dict[str, dict[str, Any]]
    method: Literal["forward", "get_image_features", "get_text_features", "encode_image", "encode_text"]
    output: str
    values: list[float]


class BaseRecord(_Model):
    """The checkpoint that an adapter belongs to: where it is, and what its files are."""

    id: str = Field(description="Hub id, or absolute path.")
    revision: str | None = Field(description="Commit of the Hub.")
    files: dict[str, str] = Field(description="SHA-256 of its weights and of the files beside them, by name.")


class Manifest(_Model):
    """Contents of ``latte.json``."""

    schema_version: Literal[1] = 1
    tool_version: str
    library_versions: dict[str, str]
    source: SourceRecord
    weights: Literal["source", "in memory"] = Field(
        default="source", description="Whether the model's own weights are the source's, or were changed in memory."
    )
    module: ModuleRecord | None = Field(
        default=None, description="For a module that no library builds from a configuration."
    )
    base: BaseRecord | None = Field(
        default=None, description="For an adapter, which holds only what was converted: the checkpoint to put it into."
    )
    recipe: dict[str, Any]
    calibration: CalibrationRecord
    sites: list[SiteRecord]
    merges: list[MergeRecord] = Field(
        default_factory=list, description="Blocks whose tokens are merged, in order of execution."
    )
    min_tokens: int = Field(ge=0)
    probe: ProbeRecord | None
    files: dict[str, str] = Field(description="SHA-256 of every file of the checkpoint.")
    results: dict[str, str] = Field(
        default_factory=dict,
        description="SHA-256 of every other file: the report, and what latte bench and latte eval measured.",
    )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what makes this hybrid: its files, its kernels and the resolution it is built for.

        ``min_tokens`` is left out: ``latte bench --write`` sets it in an artifact that has been measured.
        """
        content = self.model_dump(mode="json", include={"files": True, "sites": True, "recipe": {"resolution"}})
        if self.merges:
            content["merges"] = [merge.model_dump(mode="json") for merge in self.merges]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def shares(self) -> dict[str, float]:
        """Share of its tokens that each block works on whose tokens are merged, by name."""
        return {merge.name: merge.share for merge in self.merges}

    @field_validator("files", "results")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name:
                raise ValueError(f"'{name}' is not a file inside the artifact")
        return files

    @field_validator("sites", "merges")
    @classmethod
    def _once(cls, records: list[Any]) -> list[Any]:
        names = [record.name for record in records]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"'{twice}' is listed twice")
        return records

    @field_validator("recipe")
    @classmethod
    def _pixels(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        resolution = recipe.get("resolution")
        if resolution is not None and (type(resolution) is not int or resolution < 1):
            raise ValueError(f"resolution {resolution!r} is no number of pixels")
        return recipe


def read_manifest(directory: Path) -> Manifest:
    """Read and check ``latte.json``.

    Raises:
        IntegrityError: It is absent, damaged, or of a version this tool does not know.
    """
    path = directory / MANIFEST
    content = read_json(
        path,
        IntegrityError,
        absent=f"{directory} is not an artifact of latte: it has no {MANIFEST}.",
        advice="It is damaged: convert again, or get the file anew.",
    )
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
        raise IntegrityError(
            f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}. The manifest was changed or cut short."
        ) from None
