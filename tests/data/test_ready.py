"""Samples of a loaded model: what is accepted, and one sentence for whatever else somebody hands over."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

import latte_convert
from latte_convert.data.ready import ready_batches
from latte_convert.errors import DataError

IMAGE = torch.zeros(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.zeros(4, 3, 99, 99),
            r"the samples are one Tensor of shape \(4, 3, 99, 99\); a loaded model takes an",
        ),
        (np.zeros((4, 3, 8, 8)), r"the samples are one ndarray of shape \(4, 3, 8, 8\)"),
        ({"pixel_values": torch.zeros(4, 3, 8, 8)}, r"the samples are a dict of \{'pixel_values': Tensor\}"),
        ("words", "the samples are of the type str"),
        (3, "the samples are of the type int"),
        (None, "the samples are of the type NoneType"),
        ([IMAGE, IMAGE], r"batch 1 is one Tensor of shape \(1, 3, 8, 8\)"),
        ((IMAGE for _ in range(3)), r"batch 1 is one Tensor of shape \(1, 3, 8, 8\)"),
        ([{"pixel_values": IMAGE}, (IMAGE, torch.zeros(1))], "batch 2 is a tuple of Tensor"),
        (DataLoader(TensorDataset(torch.randn(4, 3, 8, 8), torch.zeros(4))), "batch 1 is a list of Tensor"),
        ([["a", "b"]], "batch 1 is a list of str"),
        ([{"pixel_values": [0.5, 0.5]}], r"batch 1 is a dict of \{'pixel_values': list\}"),
        ([{"text": "hello"}], r"batch 1 is a dict of \{'text': str\}"),
        ([{1: IMAGE}], r"batch 1 is a dict of \{1: Tensor\}"),
        ([{}], r"batch 1 is a dict of \{\}"),
        ([{"pixel_values": np.zeros((1, 3, 8, 8))}], "'pixel_values' of batch 1 is an array: torch.from_numpy makes"),
        ([], "0 different batches given, 2 at least are needed"),
        ([{"x": IMAGE}, {"x": IMAGE.clone()}], "1 different batches given, 2 at least are needed"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(DataError, match=message) as caught:
        ready_batches(given, 2)
    assert len(str(caught.value)) < 350


def test_what_is_accepted():
    images = [{"pixel_values": torch.full((1, 3, 8, 8), float(i))} for i in range(3)]
    for given in (images, iter(images), tuple(images), map(transformers.BatchFeature, images)):
        assert [list(batch) for batch in ready_batches(given, 2)] == [["pixel_values"]] * 3
    loader = DataLoader([{"pixel_values": torch.randn(3, 8, 8)} for _ in range(3)])
    assert [batch["pixel_values"].shape for batch in ready_batches(loader, 2)] == [IMAGE.shape] * 3
    long = [{"x": IMAGE, "levels": [torch.full((2000,), float(i)), None]} for i in range(2)]
    long[1]["levels"][0][1000] = 7  # in the part of it that a repr leaves out
    long[0]["levels"][0] = long[1]["levels"][0].clone()
    long[0]["levels"][0][1000] = 8
    assert len(ready_batches(long, 2)) == 2


def tiny():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4
    )
    return transformers.ViTModel(config).eval()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"pixels": torch.zeros(1, 3, 16, 16)}, r"batch 1: ViTModel does not run on {'pixels': \(1, 3, 16, 16\)}"),
        (
            {"pixel_values": torch.zeros(3, 16, 16)},
            r"ViTModel does not run on {'pixel_values': \(3, 16, 16\)}",
        ),
        ({"pixel_values": torch.full((1, 3, 16, 16), torch.nan)}, "batch 1: .*output is not finite"),
    ],
)
def test_a_batch_that_the_model_does_not_run_on_is_named_before_any_work(batch, message, monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("fitted to a batch that does not run")

    monkeypatch.setattr("latte_convert.conversion.analyse", never)
    batches = [batch, {name: tensor + 1 for name, tensor in batch.items()}, {"pixel_values": torch.ones(1, 3, 16, 16)}]
    with pytest.raises(DataError, match=message):
        latte_convert.convert(tiny(), batches, progress=False)
