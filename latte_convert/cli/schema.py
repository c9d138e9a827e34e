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
    bench = "bench"
    comparison = "comparison"


_MODELS = {
    Document.report: ("report.schema", "Report"),
    Document.manifest: ("artifact.manifest", "Manifest"),
    Document.recipe: ("recipe", "Recipe"),
    Document.evaluation: ("evaluation.result", "EvalReport"),
    Document.bench: ("bench.result", "BenchReport"),
    Document.comparison: ("report.compare", "Comparison"),
}


def schema(
    which: Annotated[Document, typer.Argument(help="Which document.")] = Document.report,
) -> None:
    """Print the JSON Schema of report.json, of latte.json (manifest), of a recipe, an evaluation or a comparison."""
    from importlib import import_module

    module, name = _MODELS[which]
    model = getattr(import_module(f"latte_convert.{module}"), name)
    document({"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()})
