"""The models that are compared on: what is converted, what it is fitted to and measured on, and what it is for."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latte_convert.data.feed import Batch, Inputs, run
from latte_convert.data.samples import open_samples
from latte_convert.evaluation.tasks.saliency import pearson

TINY_MODELS = Path(__file__).resolve().parents[2] / "tests" / "models"
TOKENS = 256  # of a text for MiniLM
CHOICE = 50  # pairs of like score, of which about 20 are joined
DEAR = ("taylor2",)  # with 64 channels a head 2145 features: more FLOPs than softmax below as many tokens
WORDS_MORE = 32  # tokens that a transcript may be longer than the original's longest: a broken encoder never stops


@dataclass
class Case:
    """A model with its data.

    Attributes:
        name: What ``--case`` calls it.
        about: Model, size and samples, for the heading of its table.
        model: What is converted.
        tower: The tower whose self-attention is converted; None: all of it that is not causal.
        fitting: Calibration inputs, one sample each.
        holdout: Held-out inputs, one sample each.
        originals: What the original makes of them.
        metric: Name of the task's metric.
        task: The metric, given the outputs for the held-out inputs; the model is converted while it is computed.
        real: Whether the model is one that the bars are for.
        without: Kernels that are left out.
    """

    name: str
    about: str
    model: nn.Module
    tower: str | None
    fitting: list[Batch]
    holdout: list[Batch]
    originals: list[Any]
    metric: str
    task: Callable[[Sequence[Any]], float]
    real: bool = True
    without: tuple[str, ...] = ()


def outputs(model: nn.Module, batches: Sequence[Batch]) -> list[Any]:
    """What a model makes of each batch."""
    return [run(model, Inputs(batch)) for batch in batches]


def dinov2(size: int, held_out: int) -> Callable[[Path, Path, bool], Case]:
    """DINOv2-S on photos of ``size`` pixels: its saliency map, by Pearson correlation with the original's."""

    def load(models: Path, data: Path, quick: bool) -> Case:
        from real_models.dinov2 import DECODER, session
        from transformers import AutoImageProcessor, AutoModel

        fit, held = (2, 2) if quick else (8, held_out)
        folder = models / "dinov2-small-saliency"
        model, processor = AutoModel.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder)
        box = {"size": {"max_height": size, "max_width": size}, "crop_size": {"height": size, "width": size}}
        photos = open_samples(data / "coco_val128" / "images", "image", samples=fit + held)
        batches = [dict(processor(photo.value, return_tensors="pt", **box)) for photo in photos]
        decoder = session((folder / DECODER).read_bytes())

        def maps(found: Sequence[Any]) -> list[np.ndarray]:
            side = size // model.config.patch_size
            tokens = [output.last_hidden_state[:, 1:].transpose(1, 2) for output in found]
            features = [each.unflatten(2, (side, side)).contiguous().numpy() for each in tokens]
            return [np.ravel(decoder.run(["saliency"], {"features": each})[0]) for each in features]

        originals = outputs(model, batches[fit:])
        wanted = maps(originals)
        return Case(
            name=f"dinov2-{size}",
            about=f"DINOv2-S, {size} px, {(size // 14) ** 2 + 1} tokens; {fit} photos to fit, {held} held out",
            model=model,
            tower=None,
            fitting=batches[:fit],
            holdout=batches[fit:],
            originals=originals,
            metric="saliency map, Pearson",
            task=lambda found: float(np.mean([pearson(a, b) for a, b in zip(wanted, maps(found), strict=True)])),
            without=DEAR,
        )

    return load


def minilm(models: Path, data: Path, quick: bool) -> Case:
    """MiniLM-L6 on texts of 256 tokens, joined from sentences of STS-B; the likeness of texts joined from its pairs."""
    from transformers import AutoModel, AutoTokenizer

    fit, held, pairs = (2, 2, 4) if quick else (16, 32, 24)
    folder = models / "minilm-l6"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with (data / "stsb" / "stsb-en-test.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    test, rest = rows[::7], [row for i, row in enumerate(rows) if i % 7]
    sentences = [sentence for row in rest for sentence in row[:2]]
    order = np.random.default_rng(0).permutation(len(sentences))  # the file goes from captions to news to forums
    texts = long_texts([sentences[i] for i in order], tokenizer)
    batches = [next(texts) for _ in range(fit + held)]
    originals = outputs(model, batches[fit:])
    joined = long_pairs(test, tokenizer, pairs)
    return Case(
        name="minilm",
        about=(
            f"MiniLM-L6, {TOKENS} tokens; {fit} texts to fit, {held} held out; {pairs} pairs of texts of at least "
            f"{TOKENS} tokens, each joined from about 20 pairs of STS-B of like score and scored by their mean (on its "
            "single sentences, of 14 tokens, the default near_far is softmax); so few pairs rank roughly"
        ),
        model=model,
        tower=None,
        fitting=batches[:fit],
        holdout=batches[fit:],
        originals=originals,
        metric="STS-B joined, Spearman",
        task=lambda _found: spearman(model, tokenizer, joined),
    )


def long_texts(sentences: Sequence[str], tokenizer: Any) -> Iterator[Batch]:
    """Texts of ``TOKENS`` tokens without padding, each of sentences that no other has."""
    text: list[str] = []
    for sentence in sentences:
        text.append(sentence)
        batch = dict(tokenizer(" ".join(text), truncation=True, max_length=TOKENS, return_tensors="pt"))
        if batch["input_ids"].shape[1] == TOKENS:
            yield batch
            text = []


def long_pairs(pairs: Sequence[Sequence[str]], tokenizer: Any, count: int) -> list[tuple[str, str, float]]:
    """Two texts of at least ``TOKENS`` tokens and how alike they are: pairs of STS-B joined, and their mean score.

    Pairs that are joined have like scores, from the least alike to the most: the mean of any pairs is always about 2.6.
    """
    random, joined = np.random.default_rng(0), []
    for score in np.linspace(0, 5, count):
        likest = sorted(pairs, key=lambda pair: abs(float(pair[2]) - score))[:CHOICE]
        texts, scores = ("", ""), []
        for i in random.permutation(len(likest)):
            texts = tuple(f"{text} {sentence}".strip() for text, sentence in zip(texts, likest[i], strict=False))
            scores.append(float(likest[i][2]))
            if min(len(tokenizer(text).input_ids) for text in texts) >= TOKENS:
                break
        joined.append((*texts, float(np.mean(scores))))
    return joined


def spearman(model: nn.Module, tokenizer: Any, pairs: Sequence[Sequence[Any]]) -> float:
    """Rank correlation of the cosines of mean-pooled embeddings with human scores; 0 where either is constant."""
    from scipy.stats import spearmanr

    first, second = (embed(model, tokenizer, [pair[i] for pair in pairs]) for i in (0, 1))
    cosines = torch.nn.functional.cosine_similarity(first, second).numpy()
    scores = [float(pair[2]) for pair in pairs]
    return float(spearmanr(cosines, scores).statistic) if np.ptp(cosines) > 0 else 0.0


def embed(model: nn.Module, tokenizer: Any, sentences: Sequence[str], batch: int = 50) -> Tensor:
    """Mean over the real tokens of each sentence, ``(len(sentences), D)``; sentences of like length share a batch."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    vectors: list[Tensor] = [torch.empty(0)] * len(sentences)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = dict(tokenizer([sentences[i] for i in chosen], padding=True, return_tensors="pt"))
        mask = inputs["attention_mask"][..., None]
        means = (run(model, Inputs(inputs)).last_hidden_state * mask).sum(1) / mask.sum(1)
        for i, vector in zip(chosen, means, strict=True):
            vectors[i] = vector
    return torch.stack(vectors)


def whisper(models: Path, data: Path, quick: bool) -> Case:
    """The encoder of Whisper tiny.en on windows of speech; what the exact decoder hears, against the original."""
    import soundfile
    from real_models.transcripts import error_rates
    from real_models.whisper import read_speech
    from transformers import AutoProcessor, WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    fit, held = (1, 1) if quick else (4, 10)
    folder = models / "whisper-tiny.en"
    model, processor = WhisperForConditionalGeneration.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    encoder = model.eval().get_encoder()
    batches = []
    for path in read_speech(data / "an4_windows", fit + held)[0]:
        wave, rate = soundfile.read(path, dtype="float32")
        batches.append({"input_features": processor(wave, sampling_rate=rate, return_tensors="pt").input_features})

    def tokens(found: Sequence[Any], most: int) -> Any:
        heard = BaseModelOutput(last_hidden_state=torch.cat([output.last_hidden_state for output in found]))
        return model.generate(encoder_outputs=heard, max_new_tokens=most)

    originals = outputs(encoder, batches[fit:])
    wanted = tokens(originals, 256)
    most = wanted.shape[1] + WORDS_MORE
    texts = processor.batch_decode(wanted, skip_special_tokens=True)

    def word_error_rate(found: Sequence[Any]) -> float:
        return error_rates(texts, processor.batch_decode(tokens(found, most), skip_special_tokens=True))[0]

    return Case(
        name="whisper",
        about=f"Whisper tiny.en, encoder, 1500 tokens; {fit} windows of speech to fit, {held} held out",
        model=encoder,
        tower=None,
        fitting=batches[:fit],
        holdout=batches[fit:],
        originals=originals,
        metric="word error rate against the original's transcript",
        task=word_error_rate,
        without=DEAR,
    )


def tiny_detr(_models: Path, _data: Path, quick: bool) -> Case:
    """The encoder of the DETR that this project trains, on rendered scenes."""
    import train_tiny_detr
    from scenes import render

    fit, held, scenes = (2, 2, 8) if quick else (16, 32, 100)
    model, processor = train_tiny_detr.load(TINY_MODELS / "tiny-detr")
    samples = [render("train", i) for i in range(fit)] + [render("heldout", 10_000 + i) for i in range(held)]
    batches = [dict(processor(images=scene.image, return_tensors="pt")) for scene in samples]
    test = [render("heldout", 20_000 + i) for i in range(scenes)]
    return Case(
        name="tiny-detr",
        about=f"tiny DETR, encoder, 144 tokens; {fit} scenes to fit, {held} held out, {scenes} more for AP50",
        model=model,
        tower="encoder",
        fitting=batches[:fit],
        holdout=batches[fit:],
        originals=outputs(model, batches[fit:]),
        metric="AP50",
        task=lambda _found: train_tiny_detr.evaluate(model, processor, test)["AP50"],
        real=False,
    )


def tiny_clip(_models: Path, _data: Path, quick: bool) -> Case:
    """The vision tower of the CLIP that this project trains, on rendered pairs."""
    import train_tiny_clip

    fit, held, size = (2, 2, 8) if quick else (16, 32, 200)
    parts = train_tiny_clip.load(TINY_MODELS / "tiny-clip")
    training = next(train_tiny_clip.batches("train", fit, 7))
    test = next(train_tiny_clip.batches("heldout", max(held, size)))
    batches = [train_tiny_clip.encode(parts, [pair.image], [pair.caption]) for pair in [*training, *test[:held]]]
    gallery = train_tiny_clip.encode(parts, [pair.image for pair in test], [pair.caption for pair in test])

    def recall(_found: Sequence[Any]) -> float:
        output = run(parts.model, Inputs(gallery))
        table = output.image_embeds @ output.text_embeds.T
        return (table.argmax(1) == torch.arange(len(table))).float().mean().item()

    return Case(
        name="tiny-clip",
        about=f"tiny CLIP, vision tower, 65 tokens; {fit} pairs to fit, {held} held out, retrieval from {len(test)}",
        model=parts.model,
        tower="vision",
        fitting=batches[:fit],
        holdout=batches[fit:],
        originals=outputs(parts.model, batches[fit:]),
        metric="image to text R@1",
        task=recall,
        real=False,
    )


CASES: dict[str, Callable[[Path, Path, bool], Case]] = {
    "dinov2-392": dinov2(392, 32),
    "dinov2-518": dinov2(518, 12),
    "minilm": minilm,
    "whisper": whisper,
    "tiny-detr": tiny_detr,
    "tiny-clip": tiny_clip,
}
