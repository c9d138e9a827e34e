"""Write configs/default.yaml: every setting of the recipe with its default, explained by its own description.

``python scripts/write_configs.py`` after a change of ``latte_convert/recipe.py``; a test says when it is due.
"""

from __future__ import annotations

import json
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from latte_convert.recipe import Recipe

TARGET = Path(__file__).resolve().parents[1] / "configs" / "default.yaml"
WIDTH = 110
HEAD = (
    "The default recipe: `latte convert … --config default` is the same as giving no --config at all. Copy this file "
    "and change what you need; an unknown key is an error. Made by scripts/write_configs.py."
)


def render() -> str:
    """The file's text."""
    defaults = Recipe().model_dump(mode="json")
    parts = [comment(HEAD)]
    for title, fields in groupby(Recipe.model_fields.items(), key=lambda item: group(item[1])):
        parts.append(f"# --- {title} ".ljust(WIDTH, "-"))
        for name, field in fields:
            parts.append(f"{comment(field.description or '')}\n{name}: {scalar(defaults[name])}")
    return "\n\n".join(parts) + "\n"


def group(field: FieldInfo) -> str:
    """The heading that a field stands under."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def comment(text: str) -> str:
    """A text as lines of comment."""
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def scalar(value: Any) -> str:
    """A default as YAML: JSON is YAML, but words need no quotes."""
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
