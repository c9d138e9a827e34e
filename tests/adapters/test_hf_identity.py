"""Routed to softmax attention, every family must compute what it computed before."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import ADAPTER, Exact, assert_same, eligible, exact_handlers
from tiny_models import BIASED, BY_NAME, FAMILIES, build
from tiny_parts import pixels, text, whisper_config
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall

NAMES = [family.name for family in (*FAMILIES, *BIASED)]


def _valid(inputs: dict[str, Tensor]) -> Tensor | None:
    mask = inputs.get("attention_mask")
    return mask if mask is not None and "input_ids" in inputs else None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_exact_kernel_gives_the_original(name: str, attention: str) -> None:
    model, inputs = build(name, attention), BY_NAME[name].inputs()
    handlers = exact_handlers(eligible(model))
    with torch.no_grad():
        expected = model(**inputs)
        with Host(model, ADAPTER).watch(handlers):
            actual = model(**inputs)
            as_tuple = model(**inputs, return_dict=False)
        expected_tuple = model(**inputs, return_dict=False)
    assert_same(actual, expected, _valid(inputs))
    assert_same(as_tuple, expected_tuple, _valid(inputs))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_a_handler_that_passes_leaves_bits_alone(name: str, attention: str) -> None:
    model, inputs = build(name, attention), BY_NAME[name].inputs()
    with torch.no_grad():
        expected = model(**inputs)
        with Host(model, ADAPTER).watch({site: lambda call: None for site in eligible(model)}):
            assert_same(model(**inputs), expected, tolerance=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bart", "bert", "llama", "siglip"])
def test_left_padding(name: str, attention: str) -> None:
    model, inputs = build(name, attention), BY_NAME[name].inputs()
    for key in ("input_ids", "attention_mask"):
        inputs[key] = inputs[key].flip(1)
    with torch.no_grad():
        expected = model(**inputs)
        with Host(model, ADAPTER).watch(exact_handlers(eligible(model))):
            assert_same(model(**inputs), expected, inputs["attention_mask"])


class _Counter:
    """Counts forward passes of modules."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.calls: Counter[str] = Counter()
        for name in names:
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: self.calls.update([name]))


@pytest.mark.parametrize("name", NAMES)
def test_each_site_is_called_as_often_as_it_runs(name: str) -> None:
    model = build(name)
    handlers = exact_handlers(eligible(model))
    counter = _Counter(model, list(handlers))
    with Host(model, ADAPTER).watch(handlers), torch.no_grad():
        model(**BY_NAME[name].inputs())
    assert {site: handler.calls for site, handler in handlers.items()} == dict(counter.calls)  # type: ignore[attr-defined]
    assert set(counter.calls.values()) == {1}


def _whisper() -> Any:
    return hf.WhisperForConditionalGeneration(whisper_config()).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_whisper_generates_the_same_tokens(attention: str, cache: str | None) -> None:
    model = _whisper()
    model.set_attn_implementation(attention)
    features = BY_NAME["whisper"].inputs()["input_features"]
    options: dict[str, Any] = {
        "max_new_tokens": 10,
        "min_new_tokens": 10,
        "do_sample": False,
        "num_beams": 1,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    if cache:
        options |= {"cache_implementation": cache, "disable_compile": True}
    expected = model.generate(features, **options)
    handlers = exact_handlers(eligible(model))
    counter = _Counter(model, list(handlers))
    with Host(model, ADAPTER).watch(handlers):
        actual = model.generate(features, **options)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert {site: handler.calls for site, handler in handlers.items()} == dict(counter.calls)  # type: ignore[attr-defined]
    assert counter.calls["model.encoder.layers.0.self_attn"] == 1
    assert counter.calls["model.decoder.layers.0.self_attn"] == 10


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # its new name is `cache`
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_continues_from_a_cache(attention: str) -> None:
    """A chunk of queries behind cached keys: query i sees the keys up to i + Nk - Nq."""
    model = build("llama", attention)
    ids = text((10, 10))["input_ids"]
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with Host(model, ADAPTER).watch(exact_handlers(eligible(model))):
            past = model(ids[:, :6], use_cache=True).past_key_values
            actual = model(ids[:, 6:], past_key_values=past).last_hidden_state
    torch.testing.assert_close(actual, expected[:, 6:], rtol=1e-5, atol=1e-5)


def test_llama_fills_an_empty_static_cache() -> None:
    """SDPA gets no mask, a causal flag, and more keys than queries: the rest of the cache is empty."""
    model = build("llama")
    # Transformers has renamed the argument since the oldest version that is supported here.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = text((10, 10))["input_ids"]
    seen: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        seen.append(call)
        return Exact()(call)

    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with Host(model, ADAPTER).watch(dict.fromkeys(eligible(model), attend)):
            actual = model(ids, **{argument: hf.StaticCache(model.config, max_cache_len=16)}).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (seen[0].mask, seen[0].causal, seen[0].key.shape[2]) == (None, True, 10)


def test_real_dinov2(models_dir: Path) -> None:
    model = hf.AutoModel.from_pretrained(models_dir / "dinov2-small-saliency").eval()
    _assert_identity(model, pixels(1, 112, 112), sites=12)


def test_real_minilm(models_dir: Path) -> None:
    model = hf.AutoModel.from_pretrained(models_dir / "minilm-l6").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(models_dir / "minilm-l6")
    inputs = tokenizer(
        ["A short one.", "A sentence of more than a few words, to be padded to."],
        padding=True,
        return_tensors="pt",
    )
    _assert_identity(model, dict(inputs), sites=6)


def test_real_whisper(models_dir: Path) -> None:
    model = hf.WhisperForConditionalGeneration.from_pretrained(models_dir / "whisper-tiny.en").eval()
    features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(1))
    handlers = exact_handlers(eligible(model))
    assert len(handlers) == 4 + 2 * 4
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    expected = model.generate(features, **options)
    with Host(model, ADAPTER).watch(handlers):
        assert model.generate(features, **options).tolist() == expected.tolist()
    assert all(isinstance(handler, Exact) and handler.calls for handler in handlers.values())


def _assert_identity(model: nn.Module, inputs: dict[str, Tensor], *, sites: int) -> None:
    handlers = exact_handlers(eligible(model))
    assert len(handlers) == sites
    with torch.no_grad():
        expected = model(**inputs)
        with Host(model, ADAPTER).watch(handlers):
            actual = model(**inputs)
    # Deep trained models amplify rounding: relative to the size of the output.
    size = float(expected.last_hidden_state.abs().max())
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-5 * size)
