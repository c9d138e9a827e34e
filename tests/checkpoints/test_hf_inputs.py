"""Inputs are prepared the way the checkpoint says, and no longer than the model takes."""

from __future__ import annotations

import json
import shutil
import types

import pytest
import torch
import transformers as hf

from latte_convert.checkpoints.hf_inputs import longest_text, modalities
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.decode import BadSample
from latte_convert.data.feed import Inputs, run
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


def test_a_text_of_megabytes_is_cut_before_it_is_tokenised(tiny_clip, monkeypatch):
    processor, model = resolve(tiny_clip).processor("text"), hf.CLIPModel.from_pretrained(tiny_clip)
    seen, call = [], type(processor.apply).__call__
    monkeypatch.setattr(
        type(processor.apply), "__call__", lambda self, text, **o: seen.append(len(text)) or call(self, text, **o)
    )
    batch = processor.prepare(Sample("a", "", "dog " * 2_000_000), model)
    assert batch["input_ids"].shape == (1, 24)
    assert max(seen) == 1 << 18
    assert processor.truncated == {"a"}


def test_a_token_that_the_model_does_not_know_spoils_its_own_text(tiny_clip):
    processor, model = resolve(tiny_clip).processor("text"), hf.CLIPModel.from_pretrained(tiny_clip)
    model.config.text_config.vocab_size = 10
    assert int(processor.prepare(Sample("a", "", "a man"), model)["input_ids"].max()) < 10
    with pytest.raises(BadSample, match="the tokenizer gives it token 17, and the model knows 10"):
        processor.prepare(Sample("b", "", "a man playing"), model)


def test_siglip_reads_filled_texts_without_a_mask(tiny_clip, tmp_path):
    """Its tokenizer may return a mask; the model was trained without one."""
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {**tower, "vocab_size": 40, "max_position_embeddings": 24, "projection_size": 32}
    config = hf.SiglipConfig(text_config=text, vision_config={**tower, "image_size": 32, "patch_size": 8})
    torch.manual_seed(0)
    model = hf.SiglipModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(tiny_clip)
    assert "attention_mask" in tokenizer("a dog")
    tokenizer.save_pretrained(tmp_path)
    processor = resolve(tmp_path).processor("text")
    for words in ("a dog", "a dog " * 40):
        batch = processor.prepare(Sample(words, "", words), model)
        assert set(batch) == {"input_ids"}
        assert batch["input_ids"].shape == (1, 24)
    ids = tokenizer("a dog", padding="max_length", max_length=24, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model.get_text_features(input_ids=ids)
        found = model.get_text_features(**processor.prepare(Sample("x", "", "a dog"), model))
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output)


def test_a_processor_says_what_it_is(tiny_dino, tiny_clip):
    import importlib.metadata

    image, text = (
        resolve(tiny_dino).processor("image").description(),
        resolve(tiny_clip).processor("text").description(),
    )
    assert image["class"] == "BitImageProcessor"
    assert image["backend"] in ("torchvision", "pil")
    assert image["transformers_version"] == importlib.metadata.version("transformers")
    assert text["backend"] == "tokenizers"
    assert text["tokenizers_version"] == importlib.metadata.version("tokenizers")


@pytest.mark.parametrize("name", ["tiny_dino", "tiny_clip"])
def test_outputs_are_told_by_name_where_the_configuration_asks_for_tuples(name, request, tmp_path):
    shutil.copytree(request.getfixturevalue(name), tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part["return_dict"] = False
    path.write_text(json.dumps(config))
    source = resolve(tmp_path / "source")
    model, _ = source.instantiate(source.original_tensors())
    size = 56 if name == "tiny_dino" else 48
    inputs = Inputs({"pixel_values": torch.zeros(1, 3, size, size)}, "forward" if size == 56 else "get_image_features")
    assert torch.is_tensor(run(model, inputs).last_hidden_state)
