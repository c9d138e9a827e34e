"""Inputs are prepared the way the checkpoint says, and no longer than the model takes."""

from __future__ import annotations

import types

import pytest
import torch
import transformers as hf

from latte_convert.checkpoints.hf_inputs import longest_text, modalities
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.samples import Sample
from latte_convert.errors import CheckpointError

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("model", "tokenizer_limit", "expected"),
    [
        (lambda: hf.BertModel(hf.BertConfig(**SMALL, vocab_size=20, max_position_embeddings=40)), 10**30, 40),
        (lambda: hf.BertModel(hf.BertConfig(**SMALL, vocab_size=20, max_position_embeddings=40)), 12, 12),
        # RoBERTa counts positions from the padding index on: 40 rows, the first for padding and the one before unused.
        (
            lambda: hf.RobertaModel(
                hf.RobertaConfig(**SMALL, vocab_size=20, max_position_embeddings=40, pad_token_id=1)
            ),
            10**30,
            38,
        ),
    ],
    ids=["bert", "tokenizer", "roberta"],
)
def test_longest_text_is_what_the_model_runs(model, tokenizer_limit, expected):
    model = model().eval()
    limit = longest_text(model, types.SimpleNamespace(model_max_length=tokenizer_limit))
    assert limit == expected
    with torch.no_grad():
        model(input_ids=torch.full((1, limit), 5))
        if tokenizer_limit > 1000:
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=torch.full((1, limit + 1), 5))


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (hf.Dinov2Model, ("image",)),
        (hf.BertModel, ("text",)),
        (hf.WhisperForConditionalGeneration, ("audio",)),
        (hf.Wav2Vec2Model, ("audio",)),
        (hf.CLIPModel, ("image", "text")),
        (hf.SiglipModel, ("image", "text")),
        (hf.CLIPVisionModel, ("image",)),
        (hf.CLIPTextModel, ("text",)),
        (hf.DetrForObjectDetection, ("image",)),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(value) if isinstance(value, tuple) else value),
)
def test_modalities(cls, expected):
    assert modalities(cls) == expected


def test_a_checkpoints_own_preprocessing(tiny_dino, photos):
    from PIL import Image

    image = Image.open(photos / "cat.jpg").convert("RGB")
    source = resolve(tiny_dino)
    model = hf.Dinov2Model.from_pretrained(tiny_dino)
    batch = source.processor("image").prepare(Sample("x", "", image), model)
    expected = hf.BitImageProcessor.from_pretrained(tiny_dino)(images=image, return_tensors="pt")
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert set(batch) == {"pixel_values"}


def test_long_text_is_cut_and_counted(tiny_clip):
    source = resolve(tiny_clip)
    model = hf.CLIPModel.from_pretrained(tiny_clip)
    processor = source.processor("text")
    short, long = Sample("a", "", "a man is playing"), Sample("b", "", "a dog " * 30)
    assert processor.prepare(short, model)["input_ids"].tolist()[0][0] == 1
    assert processor.prepare(long, model)["input_ids"].shape == (1, 24)
    assert processor.truncated == {"b"}


def test_a_vocabulary_is_never_made_up(tiny_clip, tmp_path):
    (tmp_path / "config.json").write_text((tiny_clip / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((tiny_clip / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        resolve(tmp_path).processor("text")
