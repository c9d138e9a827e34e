"""The model card beside an exported file."""

from __future__ import annotations

from pathlib import Path

from latte_convert.exporting.check import Difference
from latte_convert.exporting.formats import Format
from latte_convert.exporting.parts import Part
from latte_convert.exporting.subject import Subject
from latte_convert.names import CARD


def write_card(directory: Path, subject: Subject, parts: list[Part], form: Format, found: list[Difference]) -> None:
    """Write ``README.md``: what the files are, what they take and return, and how close they are to PyTorch."""
    worst = max(found, key=lambda each: each.value)
    lines = [f"# {subject.name}, exported", "", _what(subject), ""]
    lines += ["| file | takes | returns |", "|---|---|---|"]
    lines += [_row(part, form) for part in parts]
    lines += [
        "",
        f"Run by {form.runtime} on batches of 1 and 3, outputs differ from PyTorch's by at most {worst}.",
        "",
    ]
    (directory / CARD).write_text("\n".join(lines), encoding="utf-8")


def _what(subject: Subject) -> str:
    if subject.manifest is None:
        return "The original model, float32."
    kernels = " and ".join(sorted({kernel.name for kernel in subject.kernels.values()}))
    does = [f"{len(subject.kernels)} attention layers run {kernels} in the place of softmax"] if kernels else []
    if subject.merging:
        does.append("alike tokens are merged between blocks")
    return f"A hybrid, float32: {', and '.join(does)} (latte_convert {subject.manifest.tool_version})."


def _row(part: Part, form: Format) -> str:
    axes = part.inputs.axis_names()
    takes = "; ".join(f"`{name}` ({', '.join(axes[name].values())})" for name in part.inputs.example)
    returns = ", ".join(f"`{name}`" for name in part.outputs)
    return f"| `{part.stem}{form.suffix}` | {takes} | {returns} |"
