"""Where a caller asks for attention weights, a converted layer gives the exact ones, and keeps its own output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import ADAPTER, eligible, exact_handlers, latte_kernels
from tiny_models import BY_NAME, build
from tiny_parts import text, whisper_config
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.mha import TorchAdapter
from latte_convert.kernels.near_far.kernel import NearFarKernel

# The fields of an output that hold attention weights, and what they should be as long as.
LISTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def _weights(output: Any) -> dict[str, list[Tensor]]:
    found = {key: list(output[key]) for key in LISTS if output.get(key) is not None}
    for key in ("text_model_output", "vision_model_output"):
        if output.get(key) is not None:
            found[key] = list(output[key].attentions)
    return found


@pytest.mark.parametrize("name", ["bert", "vit", "dinov2", "clip", "whisper", "bart", "detr", "table_transformer"])
@torch.no_grad()
def test_every_layer_has_an_entry_and_its_right_values(name: str) -> None:
    """Routed to softmax, each layer sees what it sees in the original, so its weights are the original's."""
    model, inputs = build(name, "eager"), BY_NAME[name].inputs()
    expected = _weights(model(**inputs, output_attentions=True))
    assert expected
    with Host(model, ADAPTER).watch(exact_handlers(eligible(model))):
        plain = model(**inputs)
        asked = model(**inputs, output_attentions=True)
    actual = _weights(asked)
    assert {key: len(value) for key, value in actual.items()} == {key: len(value) for key, value in expected.items()}
    for key, layers in expected.items():
        for weights, right in zip(actual[key], layers, strict=True):
            torch.testing.assert_close(weights, right, rtol=1e-4, atol=1e-5)
    key = "text_embeds" if name == "clip" else "last_hidden_state"
    assert torch.equal(plain[key], asked[key])


@pytest.mark.parametrize("by_config", [True, False])
@torch.no_grad()
def test_a_converted_layer_keeps_its_output(by_config: bool) -> None:
    """The last layer alone is converted: its input, and so its exact weights, are those of the original."""
    model = build("bert", "eager")
    original = model(**text(), output_attentions=True)
    Host(model, ADAPTER).convert(latte_kernels(model, ["encoder.layer.1.attention.self"]))
    expected = model(**text()).last_hidden_state
    model.config.output_attentions = by_config
    hybrid = model(**text()) if by_config else model(**text(), output_attentions=True)
    assert torch.equal(hybrid.last_hidden_state, expected)
    assert not torch.equal(expected, original.last_hidden_state)
    assert len(hybrid.attentions) == 2
    for weights, right in zip(hybrid.attentions, original.attentions, strict=True):
        assert torch.equal(weights, right)


@torch.no_grad()
def test_weights_that_nobody_asks_for_are_not_computed() -> None:
    model, calls = build("bert", "eager"), []
    module = model.get_submodule("encoder.layer.1.attention.self")
    module.register_forward_hook(lambda *args: calls.append(args[2][1]))
    Host(model, ADAPTER).convert(latte_kernels(model))
    model(**text())
    assert calls == [None]


@torch.no_grad()
def test_layers_that_are_not_told_are_heard_of_through_the_hooks() -> None:
    """ViT's layers get no output_attentions; Transformers collects what its hooks see."""
    model = build("vit", "eager")
    Host(model, ADAPTER).convert(latte_kernels(model))
    output = model(**BY_NAME["vit"].inputs(), output_attentions=True)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 17, 17)] * 2
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, 4, 17))


@torch.no_grad()
def test_torch_gives_weights_to_those_that_name_them() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4, batch_first=True)}).eval()
    x = torch.randn(2, 5, 16)
    mean, each = (model["attn"](x, x, x, average_attn_weights=average)[1] for average in (True, False))
    Host(model, TorchAdapter()).convert(latte_kernels(model))
    output, none = model["attn"](x, x, x)
    assert none is None
    assert model["attn"](x, x, x, need_weights=False)[1] is None
    for average, right in ((True, mean), (False, each)):
        named, weights = model["attn"](x, x, x, need_weights=True, average_attn_weights=average)
        assert torch.equal(weights, right)
        assert torch.equal(named, output)


def _timestamps(model: Any, features: Tensor, **options: Any) -> Any:
    return model.generate(
        features, return_token_timestamps=True, return_timestamps=True, num_frames=features.shape[-1],
        return_dict_in_generate=True, do_sample=False, num_beams=1, **options,
    )  # fmt: skip


def _whisper() -> Any:
    torch.manual_seed(0)
    model: Any = hf.WhisperForConditionalGeneration(whisper_config()).eval()
    settings = model.generation_config
    settings.alignment_heads = [[0, 0], [1, 1]]
    settings.no_timestamps_token_id, settings.max_initial_timestamp_index = 40, 10
    settings.is_multilingual = False
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_token_timestamps_of_whisper(attention: str) -> None:
    """They are read from the cross-attention, layer by layer: an entry that is left out shifts the others."""
    features = BY_NAME["whisper"].inputs()["input_features"]
    model = _whisper()
    model.set_attn_implementation(attention)
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    expected = _timestamps(model, features, **options)
    cross = [name for name in eligible(model) if "encoder_attn" in name]
    assert len(cross) == 2
    for names in (cross[:1], cross[1:], cross):
        model = _whisper()
        model.set_attn_implementation(attention)
        with Host(model, ADAPTER).watch(exact_handlers(names)):
            actual = _timestamps(model, features, **options)
        assert actual["sequences"].tolist() == expected["sequences"].tolist()
        torch.testing.assert_close(actual["token_timestamps"], expected["token_timestamps"])


def test_word_timestamps_of_a_real_whisper(models_dir: Path, speech: Path) -> None:
    """Encoder and cross-attention of a hybrid: the words it hears begin when they begin for the original."""
    import soundfile

    path = models_dir / "whisper-tiny.en"
    processor = hf.AutoProcessor.from_pretrained(path)
    wave, rate = soundfile.read(sorted(speech.rglob("*.wav"))[0])
    features = processor(wave, sampling_rate=rate, return_tensors="pt").input_features

    def starts(convert: bool) -> Any:
        model: Any = hf.WhisperForConditionalGeneration.from_pretrained(path).eval()
        model.generation_config.alignment_heads = [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
        if convert:
            sites = [s for s in Host.of(model).sites() if s.tower == "encoder" or s.kind == "cross"]
            kernels = {s.name: NearFarKernel(s.heads, s.head_dim, clusters=256) for s in sites}
            Host.of(model).convert(kernels)
        return _timestamps(model, features, max_new_tokens=40)

    expected, actual = starts(False), starts(True)
    length = min(expected["token_timestamps"].shape[1], actual["token_timestamps"].shape[1])
    difference = (expected["token_timestamps"] - actual["token_timestamps"][:, :length])[:, :length].abs()
    assert float(difference.median()) <= 0.1
    assert float(expected["token_timestamps"].max()) > 1


def test_the_speech_pipeline_tells_when_words_are_said(models_dir: Path, speech: Path) -> None:
    """Beam search and timestamps of a hybrid, whose encoder and cross-attention are ours: the original's, in order."""
    import soundfile

    path = models_dir / "whisper-tiny.en"
    parts = hf.AutoTokenizer.from_pretrained(path), hf.AutoFeatureExtractor.from_pretrained(path)
    wave, rate = soundfile.read(sorted(speech.rglob("*.wav"))[0], dtype="float32")

    def heard(convert: bool) -> Iterator[Any]:
        model: Any = hf.WhisperForConditionalGeneration.from_pretrained(path).eval()
        model.generation_config.alignment_heads = [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
        if convert:
            sites = [s for s in Host.of(model).sites() if s.tower == "encoder" or s.kind == "cross"]
            Host.of(model).convert({s.name: NearFarKernel(s.heads, s.head_dim, clusters=256) for s in sites})
        listen = hf.pipeline(
            "automatic-speech-recognition", model=model, tokenizer=parts[0], feature_extractor=parts[1]
        )
        for kind in ("word", True):
            sound = {"raw": wave, "sampling_rate": rate}  # which the pipeline empties
            yield listen(sound, return_timestamps=kind, generate_kwargs={"num_beams": 2, "max_new_tokens": 40})

    expected, actual = list(heard(False)), list(heard(True))
    words = [chunk["text"].strip() for chunk in expected[0]["chunks"]]
    assert len(words) > 5
    assert words == expected[1]["text"].split()
    assert actual == expected
    for found in actual:
        times = [time for chunk in found["chunks"] for time in chunk["timestamp"]]
        assert times == sorted(times)
