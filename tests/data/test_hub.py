"""Samples streamed from the Hub, and names that are not for it."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from data.making import (
    encoded,
    everything,
    fill,
    picture,
    put,
    reasons,
    texts,
)

from latte_convert.data.samples import open_samples
from latte_convert.errors import DataError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A stand-in for the Hub that streams real ``datasets`` objects; the names asked for."""
    datasets = pytest.importorskip("datasets")
    put(tmp_path / "img.png", encoded(picture(9)))
    images: list[object] = [{"bytes": encoded(picture(n)), "path": None} for n in range(9)]
    images += [{"bytes": None, "path": str(tmp_path / "img.png")}, {"bytes": b"x", "path": None}]
    features = datasets.Features({"label": datasets.Value("int64"), "img": datasets.Image()})
    pictures = datasets.Dataset.from_dict({"label": list(range(11)), "img": images}, features=features)
    words = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(100)]})
    stored = {"org/images": {"test": pictures}, "words": {"train": words, "validation": words}}
    asked: list[str] = []

    def load_dataset(name: str, *, streaming: bool) -> object:
        assert streaming
        asked.append(name)
        if name not in stored:
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub")
        return datasets.IterableDatasetDict({k: v.to_iterable_dataset() for k, v in stored[name].items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub_images_are_streamed_once(hub: list[str]) -> None:
    found = everything("hf:org/images", "image")
    assert sorted(found.ids) == sorted(f"test:{n}" for n in range(10))
    assert reasons(found) == {"test:10": "not an image, or of a format Pillow cannot read"}
    for sample in [*found, *found]:
        np.testing.assert_array_equal(np.asarray(sample.value), np.asarray(picture(int(sample.id[5:]))))
    assert hub == ["org/images"]


@pytest.mark.parametrize(
    ("spec", "split", "rows"),
    [
        ("hf:words", "train", range(8)),  # four rows a sample
        ("hf:words:validation", "validation", range(8)),
        ("hf:words:train:90:", "train", range(90, 98)),
        ("hf:words::10:13", "train", range(10, 13)),
        ("hf:words:train:98:200", "train", range(98, 100)),
    ],
)
def test_hub_split_and_slice(hub: list[str], spec: str, split: str, rows: range) -> None:
    first = open_samples(spec, "text", samples=2)
    assert texts(first).items() <= {f"{split}:{n}": f"row {n}" for n in rows}.items()
    assert open_samples(spec, "text", samples=2).ids == first.ids


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:nobody/nothing", "Couldn't reach 'nobody/nothing'.*HF_HUB_OFFLINE"),
        ("hf:words:trian", "no split 'trian' .nearest: train"),
        ("hf:words:train:5:5", "holds no rows"),
        ("hf:words:train:5", "not of the form start:stop"),
        ("hf:words:train:500:600", "split 'train' has no rows there"),
        ("hf:./photos", "without hf:"),
        ("hf:", "not the name of a Hub dataset"),
        ("hf:org/images", "it has 'label', 'img'"),
    ],
)
def test_hub_errors(hub: list[str], spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_samples(spec, "text", samples=1)


def test_existing_path_wins(hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "words", 1)
    fill(tmp_path / "hf:words", 2)
    assert len(open_samples("words", "image", samples=1)) == 1
    assert len(open_samples("hf:words", "image", samples=2)) == 2
    (tmp_path / "hf:words").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="'words' is a local path here"):
        open_samples("hf:words", "image", samples=1)
    assert hub == []


def test_offline_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")

    def refuse(*args: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(DataError, match="Offline"):
        open_samples("hf:nobody/nothing", "text", samples=1)
