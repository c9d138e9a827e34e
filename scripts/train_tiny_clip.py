"""Train a small two-tower CLIP on captioned scenes of coloured digits, on one CPU core.

    python scripts/train_tiny_clip.py --out tests/models/tiny-clip [--steps 1400] [--seed 0]
    python scripts/train_tiny_clip.py --evaluate tests/models/tiny-clip

The pictures come from ``scripts/scenes.py``. A caption says how many digits there are and names the largest, or the two
largest: "three digits , a red seven at the top left and a green four at the bottom right". Training scenes are drawn as
they are needed and never twice; held-out scenes show digits that no training scene shows.
The result is a Transformers directory: ``CLIPModel``, image processor and tokenizer.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scenes import COLOURS, COLUMNS, ROWS, Scene, render
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.optimization import get_cosine_schedule_with_warmup

SIZE = 64  # pixels a side
PATCH = 8  # the smallest digit spans about two
WIDTH = 128
BATCH = 32
HELD_OUT = 200  # pairs to retrieve from, so that chance is 0.5 %
SAVE_EVERY = 200
POSITIONS = 24
PLACES = [f"{row} {column}" for row in ROWS for column in COLUMNS]
FACTS = (6, *(10, len(COLOURS), len(PLACES)) * 2)  # kinds of counts; of digits, colours and places of two objects
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}


class Named(NamedTuple):
    """What a caption says of one object."""

    digit: int
    colour: str
    place: str


@dataclass(frozen=True)
class Pair:
    """A picture, uint8 ``(SIZE, SIZE, 3)``, how many digits it shows, and those that its caption names."""

    image: np.ndarray
    count: int
    named: tuple[Named, ...]

    @property
    def caption(self) -> str:
        """The true caption."""
        return caption(self.count, self.named)


class Parts(NamedTuple):
    """What a model directory holds."""

    model: CLIPModel
    tokenizer: PreTrainedTokenizerBase
    processor: CLIPImageProcessor


def caption(count: int, named: tuple[Named, ...]) -> str:
    """The sentence for ``count`` digits of which ``named`` are described."""
    objects = (
        f"{'an' if item.colour == 'orange' else 'a'} {item.colour} {NUMBERS[item.digit]} at the {item.place}"
        for item in named
    )
    return f"{NUMBERS[count]} digit{'s' if count > 1 else ''} , {' and '.join(objects)}"


def largest(scene: Scene, most: int) -> tuple[Named, ...]:
    """At most ``most`` objects, those with the largest boxes first."""
    areas = np.prod(scene.boxes[:, 2:] - scene.boxes[:, :2], axis=1)
    chosen = np.argsort(-areas, kind="stable")[:most]
    return tuple(Named(int(scene.labels[i]), scene.colours[i], scene.places[i]) for i in chosen)


def batches(split: str, size: int, seed: int = 0) -> Iterator[list[Pair]]:
    """Endless batches of pairs, no scene twice, and no caption twice in a batch: each picture has one right answer.

    Captions name one object and two in turn.
    """
    pairs: dict[str, Pair] = {}
    for index in itertools.count():
        scene = render(split, index, seed, SIZE)
        pair = Pair(scene.image, len(scene.labels), largest(scene, 1 + index % 2))
        pairs.setdefault(pair.caption, pair)
        if len(pairs) == size:
            yield list(pairs.values())
            pairs = {}


def twins(pair: Pair, rng: np.random.Generator) -> list[str]:
    """The caption of ``pair`` with one wrong digit, and with one wrong place, everything else being right.

    Colours and counts tell nearly all pictures of a batch apart: without such captions there would be little reason to
    learn where things are, or to read.
    """
    at = int(rng.integers(len(pair.named)))
    item = pair.named[at]
    place = PLACES[(PLACES.index(item.place) + int(rng.integers(1, len(PLACES)))) % len(PLACES)]
    wrong = item._replace(digit=(item.digit + int(rng.integers(1, 10))) % 10), item._replace(place=place)
    return [caption(pair.count, (*pair.named[:at], each, *pair.named[at + 1 :])) for each in wrong]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, over the words that captions use."""
    words = ["a", "an", "and", "at", "the", ",", "digit", "digits", *NUMBERS, *COLOURS, *ROWS, *COLUMNS]
    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in (SPECIAL["bos_token"], SPECIAL["eos_token"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **SPECIAL)


def build() -> Parts:
    """A model with random weights, and what feeds it."""
    tokenizer = build_tokenizer()
    tower = dict.fromkeys(("hidden_size", "projection_dim"), WIDTH)
    tower |= {"intermediate_size": 4 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": POSITIONS,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        # CLIP pools the token with this id. It must not be 2: that means "the highest id" for the sake of old files.
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {**tower, "image_size": SIZE, "patch_size": PATCH}
    model = CLIPModel(CLIPConfig(text_config={**tower, **text}, vision_config=vision, projection_dim=WIDTH))
    size = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}}
    processor = CLIPImageProcessor(**size, image_mean=[0.33] * 3, image_std=[0.33] * 3)  # of the pictures, about
    with torch.no_grad():
        model.vision_model.embeddings.position_embedding.weight.copy_(grid_positions(SIZE // PATCH, WIDTH))
    return Parts(model, tokenizer, processor)


def grid_positions(side: int, width: int) -> Tensor:
    """Sines and cosines of row and column, a quarter of the channels each, ``(1 + side^2, width)``; CLS is zero."""
    waves = torch.pi / side * 2.0 ** torch.linspace(-1, 2, width // 4)  # a quarter turn over the picture to two turns
    angles = (torch.arange(side) + 0.5)[:, None] * waves
    axis = torch.cat([angles.sin(), angles.cos()], 1)  # (side, width / 2)
    grid = torch.cat([axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)], 2).flatten(0, 1)
    return 0.2 * torch.cat([torch.zeros(1, width), grid])


def load(folder: Path) -> Parts:
    """Read a directory that :func:`save` wrote."""
    model = CLIPModel.from_pretrained(folder).eval()
    return Parts(model, AutoTokenizer.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder))


def encode(parts: Parts, images: list[np.ndarray], captions: list[str]) -> dict[str, Tensor]:
    """The model's inputs: ``pixel_values`` ``(B, 3, SIZE, SIZE)``, ``input_ids`` and ``attention_mask`` ``(C, L)``."""
    text = parts.tokenizer(captions, padding=True, return_tensors="pt")
    return {**text, "pixel_values": parts.processor(images, return_tensors="pt")["pixel_values"]}


def contrast(logits: Tensor, size: int) -> Tensor:
    """Contrastive loss of ``logits`` ``(B, 3B)``: a picture must also beat the wrong twins of every caption."""
    target = torch.arange(size)
    return (cross_entropy(logits, target) + cross_entropy(logits[:, :size].T, target)) / 2


def facts_loss(outputs: Tensor, pairs: list[Pair]) -> Tensor:
    """Cross-entropy of the facts that captions state, read off pictures by a linear layer, ``outputs`` ``(B, 60)``.

    With the contrastive loss alone, places and digits were still at chance when colours and counts were long known.
    """
    rows = []
    for pair in pairs:
        facts = [(item.digit, list(COLOURS).index(item.colour), PLACES.index(item.place)) for item in pair.named]
        rows.append([pair.count, *itertools.chain(*facts), *[-100] * (3 * (2 - len(facts)))])
    columns = zip(outputs.split(FACTS, dim=1), torch.tensor(rows).T, strict=True)
    return sum((cross_entropy(o, t, reduction="sum") for o, t in columns), torch.zeros(())) / len(pairs)


@torch.no_grad()
def evaluate(parts: Parts, size: int = HELD_OUT) -> dict[str, float]:
    """Recall on ``size`` held-out pairs both ways, and the share of digits read right.

    A digit is read by offering the ten captions that differ in the digit of the first object, and nothing else.
    """
    pairs = next(batches("heldout", size))
    readings = [
        caption(pair.count, (pair.named[0]._replace(digit=digit), *pair.named[1:]))
        for pair in pairs
        for digit in range(10)
    ]
    output = parts.model(**encode(parts, [pair.image for pair in pairs], [pair.caption for pair in pairs] + readings))
    images, texts = output.image_embeds, output.text_embeds  # (size, d) and (11 size, d), of unit length
    logits = images @ texts[:size].T
    scores: dict[str, float] = {}
    for way, table in (("image_to_text", logits), ("text_to_image", logits.T)):
        better = (table > table.diagonal()[:, None]).sum(1)
        scores |= {f"{way}_r{k}": (better < k).float().mean().item() for k in (1, 5)}
    read = torch.einsum("nd,nkd->nk", images, texts[size:].reshape(size, 10, -1)).argmax(1)
    truth = torch.tensor([pair.named[0].digit for pair in pairs])
    return {**scores, "digit_read": (read == truth).float().mean().item()}


def save(parts: Parts, out: Path, step: int, steps: int, seed: int) -> dict[str, float]:
    """Evaluate, and write the directory with its card as a whole or not at all; returns the scores."""
    parts.model.eval()
    scores = evaluate(parts)
    parts.model.train()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "new"
        for part in parts:
            part.save_pretrained(new)
        (new / "README.md").write_text(
            "# tiny-clip\n\n"
            f"CLIP with {parts.model.num_parameters() / 1e6:.2f} M parameters, trained from scratch by "
            f"`scripts/train_tiny_clip.py` (seed {seed}, {step} of {steps} steps of {BATCH} pairs) on rendered scenes "
            "of scikit-learn's handwritten digits. A test model: it knows nothing else.\n\n"
            f"On {HELD_OUT} held-out pairs: {', '.join(f'{name} {value:.3f}' for name, value in scores.items())} "
            f"(chance: r1 {1 / HELD_OUT:.3f}, r5 {5 / HELD_OUT:.3f}, digit_read 0.100).\n"
        )
        for path in new.iterdir():
            path.chmod(0o644)  # safetensors makes its file readable by the owner only
        if out.exists():
            out.rename(Path(scratch) / "old")
        new.rename(out)
    return scores


def train(out: Path, steps: int, seed: int) -> None:
    """Train from random weights; the state is saved every :data:`SAVE_EVERY` steps and at the end."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    parts = build()
    head = torch.nn.Linear(WIDTH, sum(FACTS))
    parameters = [*parts.model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(100, steps // 10), steps)
    start, recent = time.monotonic(), []
    for step, pairs in enumerate(itertools.islice(batches("train", BATCH, seed), steps), start=1):
        captions = [pair.caption for pair in pairs] + [twin for pair in pairs for twin in twins(pair, rng)]
        output = parts.model(**encode(parts, [pair.image for pair in pairs], captions))
        facts = facts_loss(head(output.vision_model_output.pooler_output), pairs)
        value = contrast(output.logits_per_image, len(pairs)) + 0.3 * facts
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        recent.append(value.item())
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps} loss {np.mean(recent):.3f} {time.monotonic() - start:.0f} s", flush=True)
            recent.clear()
        if step % SAVE_EVERY == 0 or step == steps:
            scores = save(parts, out, step, steps, seed)
            print("  ".join(f"{name} {value:.3f}" for name, value in scores.items()), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="train, and write the model directory here, over one that is there")
    action.add_argument("--evaluate", type=Path, metavar="DIR", help="print the scores of a trained model")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.evaluate:
        for name, value in evaluate(load(arguments.evaluate)).items():
            print(f"{name} {value:.3f}")
    else:
        train(arguments.out, arguments.steps, arguments.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
