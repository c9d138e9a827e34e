"""The rows of the source paper's tables, with the figures it gives for them, in percent.

The figures are those of a summary of the paper. Where it names no checkpoint, ``note`` says how one was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figures:
    """What the paper reports of one metric; None where it gives no number."""

    original: float | None = None
    qt_vit: float | None = None
    latte: float | None = None


@dataclass(frozen=True)
class Row:
    """One evaluation of one conversion.

    Attributes:
        name: What ``--row`` calls it.
        table: The paper's table or paragraph.
        model: Hub id.
        calib: Name of the calibration samples (``datasets.CALIBRATION``).
        task: Of ``latte eval``.
        data: Names of the data (``datasets.DATA``), as many as the task takes places.
        figures: What the paper reports, by metric of the task.
        settings: What differs from the paper's own recipe (``configs/paper.yaml``); ``options`` are those of latte.
        templates: Prompts of ``zero-shot``.
        note: What the paper leaves open.
    """

    name: str
    table: str
    model: str
    calib: str
    task: str
    data: tuple[str, ...]
    figures: dict[str, Figures]
    settings: dict[str, Any] = field(default_factory=dict)
    templates: tuple[str, ...] = ()
    note: str = ""


VISION = {"towers": ("vision",)}
CLIP = "openai/clip-vit-large-patch14"
SIGLIP = "google/siglip-so400m-patch14-384"
_MODELS = {
    "clip": (CLIP, ""),
    "siglip": (SIGLIP, "The summary names no size of SigLIP."),
}
_ABLATION = {  # text and image recall without JPN and TTE, with one of them
    "clip": {"neither": (42.0, 31.2), "jpn": (65.1, 47.9), "tte": (71.5, 52.8)},
    "siglip": {"neither": (82.3, 69.0), "jpn": (83.2, 69.6), "tte": (86.3, 73.3)},
}
_ZERO_SHOT = {  # CLIP's own prompts
    "cifar10": "a photo of a {}.",
    "eurosat": "a centered satellite photo of {}.",
    "food101": "a photo of {}, a type of food.",
}


def _recall(text: Figures, image: Figures) -> dict[str, Figures]:
    """Text recall and image recall, which match R@5."""
    return {"i2t_r5": text, "t2i_r5": image}


def _main() -> Iterator[Row]:
    table = "Main results"
    yield Row(
        "detr", table, "facebook/detr-resnet-50", "coco-train", "detection", ("coco",),
        {"ap50": Figures(62.3, 52.5, 59.2), "ap": Figures(42.0, 35.9, 39.9)},
    )  # fmt: skip
    yield Row(
        "rt-detr", table, "PekingU/rtdetr_r34vd", "coco-train", "detection", ("coco",),
        {"ap50": Figures(65.9, 54.5, 62.9), "ap": Figures(49.0, 40.6, 46.7)},
        note="The summary names no size of RT-DETR; the AP of the original is nearest to that published for R34.",
    )  # fmt: skip
    recalls = {
        "clip": _recall(Figures(79.4, 42.0, 77.1), Figures(61.1, 31.2, 59.7)),
        "siglip": _recall(Figures(90.0, 82.3, 87.9), Figures(76.5, 69.0, 75.8)),
    }
    for name, figures in recalls.items():
        model, note = _MODELS[name]
        yield Row(name, table, model, "coco-train", "retrieval", ("coco-captions",), figures, VISION, note=note)


def _ablation() -> Iterator[Row]:
    for name, parts in _ABLATION.items():
        model, note = _MODELS[name]
        for part, (text, image) in parts.items():
            switches = {"options": {"tte": part == "tte", "jpn": part == "jpn"}}
            yield Row(
                f"{name}-{part}", "Ablation of TTE and JPN", model, "coco-train", "retrieval", ("coco-captions",),
                _recall(Figures(latte=text), Figures(latte=image)), VISION | switches,
                note=" ".join(filter(None, (note, "The figure under LATTE is that of the variant."))),
            )  # fmt: skip


def _progressive() -> Iterator[Row]:
    """A share of CLIP's 24 layers, so that the proof on a smaller model converts as much of it."""
    notes = {12: "QT-ViT is said to collapse from here on.", 18: "LATTE is said to keep over 94% here."}
    for layers, note in notes.items():
        yield Row(
            f"clip-{layers}-of-24", "Progressive replacement", CLIP, "coco-train", "retrieval", ("coco-captions",),
            _recall(Figures(), Figures()), VISION | {"ratio": layers / 24}, note=note,
        )  # fmt: skip


def _also() -> Iterator[Row]:
    table, note = "Also tried", "The summary gives no figures, and does not name the checkpoint."
    yield Row(
        "clip-sugarcrepe", table, CLIP, "coco-train", "compositional", ("sugarcrepe",), {"accuracy": Figures()},
        VISION, note=note,
    )  # fmt: skip
    for data, template in _ZERO_SHOT.items():
        yield Row(
            f"clip-{data}", table, CLIP, "coco-train", "zero-shot", (data,), {"accuracy": Figures()}, VISION,
            (template,), note,
        )  # fmt: skip
    yield Row(
        "roberta", table, "siebert/sentiment-roberta-large-english", "sst2-train", "classification", ("sst2",),
        {"accuracy": Figures()}, note=note + " Nor the task; this is sentiment on SST-2.",
    )  # fmt: skip


ROWS: tuple[Row, ...] = (*_main(), *_ablation(), *_progressive(), *_also())
