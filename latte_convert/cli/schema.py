"""``latte schema``: the JSON Schemas that reports and manifests follow."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from latte_convert.cli.console import document


class Document(str, Enum):
    """Documents with a published schema."""

    report = "report"
    manifest = "manifest"
    recipe = "recipe"
    evaluation = "eval"


def schema(
    which: Annotated[Document, typer.Argument(help="Which document.")] = Document.report,
) -> None:
    """Print the JSON Schema of report.json, of latte.json (manifest), of a recipe, or of an evaluation."""
    if which is Document.report:
        from latte_convert.report.schema import Report as Model
    elif which is Document.manifest:
        from latte_convert.artifact.manifest import Manifest as Model  # type: ignore[assignment]
    elif which is Document.evaluation:
        from latte_convert.evaluation.result import EvalReport as Model  # type: ignore[assignment]
    else:
        from latte_convert.recipe import Recipe as Model  # type: ignore[assignment]
    document({"$schema": "https://json-schema.org/draft/2020-12/schema", **Model.model_json_schema()})
