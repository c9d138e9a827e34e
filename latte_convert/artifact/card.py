"""The model card of an artifact: ``README.md`` with the fields that the Hub reads, and what was measured."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte_convert.artifact.manifest import Manifest
from latte_convert.errors import first_line
from latte_convert.names import CARD, HUB_ID, ORIGINAL
from latte_convert.wording import rounded_down, some

_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
"""What the hybrid has from its base, as the base's own card says it."""
_LIBRARIES = {"torch": "pytorch", "open_clip": "open_clip", "timm": "timm", "transformers": "transformers"}


@dataclass(frozen=True)
class Measured:
    """One figure for the card.

    Attributes:
        task: What the model did, such as ``fidelity`` or ``knn``.
        metric: What was measured.
        value: The hybrid's.
        original: The original's; None where it is the reference.
        interval: 95% interval; None where there is none.
        of: What the interval is of, such as "likeness" or "retention".
        data: What the samples were.
        samples: How many.
    """

    task: str
    metric: str
    value: float
    original: float | None
    interval: tuple[float, float] | None
    of: str
    data: str
    samples: int


def card_text(manifest: Manifest, base: Path | None, measured: Sequence[Measured] = ()) -> str:
    """The card.

    Args:
        manifest: What the artifact records.
        base: The card of the source, or None.
        measured: Figures, the main ones first.
    """
    from huggingface_hub import EvalResult, ModelCardData

    source, name = manifest.source, _name_of(manifest)
    fields: dict[str, Any] = {key: value for key, value in _fields_of(base).items() if key in _KEPT and value}
    if re.fullmatch(HUB_ID, source.id):
        fields["base_model"] = source.id
        if manifest.base is not None:
            fields["base_model_relation"] = "adapter"
    results = [
        EvalResult(
            task_type=each.task,
            dataset_type=each.data or "unknown",
            dataset_name=each.data or "unknown",
            metric_type=each.metric,
            metric_value=each.value,
            metric_args={"samples": each.samples, **({f"{each.of}_95": list(each.interval)} if each.interval else {})},
        )
        for each in measured
    ]
    data = ModelCardData(
        library_name=_LIBRARIES.get(source.library, source.library),
        tags=["latte-convert", "linear-attention", *sorted({site.kernel for site in manifest.sites})],
        model_name=name if results else None,
        eval_results=results or None,
        **fields,
    )
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(_body(name, manifest, measured)) + "\n"


def write_card(directory: Path, manifest: Manifest, measured: Sequence[Measured] = ()) -> None:
    """Write the card of an artifact that is being made; see ``card_text``."""
    base = directory / ORIGINAL / CARD
    text = card_text(manifest, base if base.is_file() else None, measured)
    (directory / CARD).write_text(text, encoding="utf-8")


def _name_of(manifest: Manifest) -> str:
    """Of the base, whatever the folder is called: equal conversions have equal cards."""
    source = manifest.source
    return f"{source.model_class if source.id == 'in memory' else Path(source.id).name}-hybrid"


def _fields_of(card: Path | None) -> dict[str, Any]:
    """The fields of the base's card; none where it has no card, or one that is not valid."""
    if card is None:
        return {}
    from huggingface_hub import ModelCard

    try:
        return dict(ModelCard.load(card).data.to_dict())
    except Exception as error:  # YAML of others can be wrong in many ways
        logging.getLogger("latte_convert").warning("the fields of %s cannot be read: %s", card.name, first_line(error))
        return {}


def _body(name: str, manifest: Manifest, measured: Sequence[Measured]) -> Iterable[str]:
    source = manifest.source
    kernels = " and ".join(sorted({f"`{site.kernel}`" for site in manifest.sites})) or "nothing"
    base = (
        f"[{source.id}](https://huggingface.co/{source.id})"
        if re.fullmatch(HUB_ID, source.id)
        else Path(source.id).name
    )
    at = f" at {source.revision[:12]}" if source.revision else ""
    yield f"# {name}"
    yield ""
    yield (
        f"A hybrid of {base}{at} ({source.model_class}), made without training by latte_convert "
        f"{manifest.tool_version}: {len(manifest.sites)} attention layers run {kernels} in the place of softmax, the "
        "others as they were."
    )
    yield ""
    yield "```python"
    yield "import latte_convert  # without it, attention runs as in the original"
    yield ""
    yield 'model = latte_convert.load("DIRECTORY")'
    yield "```"
    if measured:
        yield ""
        yield "Measured on samples that the conversion has not seen:"
        yield ""
        yield "| task | metric | original | hybrid | 95 % interval | samples |"
        yield "|---|---|---|---|---|---|"
        yield from map(_row, measured)
    yield ""
    yield f"Converted: {some((f'`{site.name}`' for site in manifest.sites), 12)}."


def _row(each: Measured) -> str:
    original = "reference" if each.original is None else rounded_down(each.original)
    low_high = "…".join(map(rounded_down, each.interval)) + f" ({each.of})" if each.interval else "not known"
    return f"| {each.task} | {each.metric} | {original} | {rounded_down(each.value)} | {low_high} | {each.samples} |"
