from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import latte_convert
from latte_convert.errors import DataError, InputError
from latte_convert.evaluation.evaluate import evaluate

pytestmark = pytest.mark.slow

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "magenta", "white")


@pytest.fixture(scope="module")
def crepe(scenes, tmp_path_factory):
    """Captions of the scenes beside captions with another colour and with another place."""
    root = tmp_path_factory.mktemp("crepe")
    colours, places = {}, {}
    for i, (name, (text, _)) in enumerate(scenes.captions.items()):
        colour = next(c for c in COLOURS if f" {c} " in text)
        other = COLOURS[(COLOURS.index(colour) + 1 + i % 7) % 8]
        colours[str(i)] = {"filename": name, "caption": text, "negative_caption": text.replace(colour, other)}
        row = next(r for r in ("top", "middle", "bottom") if f"the {r}" in text)
        moved = text.replace(f"the {row}", "the top" if row != "top" else "the bottom")
        places[str(i)] = {"filename": name, "caption": text, "negative_caption": moved}
    (root / "colour.json").write_text(json.dumps(colours))
    (root / "place.json").write_text(json.dumps(dict(list(places.items())[:20]), indent=1))
    return root


@torch.no_grad()
def by_hand(model, folder, scenes, path):
    """One entry after another: is the logit of the caption the larger of two?"""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.CLIPImageProcessor.from_pretrained(folder)
    right = []
    for entry in json.loads(path.read_text()).values():
        pixels = processor(Image.open(scenes.root / "images" / entry["filename"]), return_tensors="pt")
        words = tokenizer([entry["caption"], entry["negative_caption"]], padding=True, return_tensors="pt")
        good, bad = model(**pixels, **words).logits_per_image[0].tolist()
        right.append(good > bad)
    return right


def test_accuracy_by_hand(clip_artifact, tiny_models, scenes, crepe):
    report = evaluate(clip_artifact, "compositional", [crepe, scenes.root / "images"], batch_size=32)
    original = transformers.CLIPModel.from_pretrained(tiny_models / "tiny-clip").eval()
    for which, model in (("original", original), ("hybrid", latte_convert.load(clip_artifact))):
        colour, place = (
            by_hand(model, tiny_models / "tiny-clip", scenes, crepe / f"{name}.json") for name in ("colour", "place")
        )
        assert getattr(report.metrics["accuracy"], which) == pytest.approx(np.mean(colour + place))
        assert getattr(report.metrics["accuracy@colour"], which) == pytest.approx(np.mean(colour))
        assert getattr(report.metrics["accuracy@place"], which) == pytest.approx(np.mean(place))
    assert report.samples == 80
    assert report.metrics["accuracy@colour"].original > 0.8  # chance is 0.5
    assert report.primary == "accuracy"


def test_one_file_has_no_parts(clip_artifact, scenes, crepe):
    report = evaluate(clip_artifact, "compositional", [crepe / "colour.json", scenes.root], samples=10)
    assert set(report.metrics) == {"accuracy"}
    assert report.samples == 10


ENTRY = '{"filename": "%s", "caption": "%s", "negative_caption": "%s"}'


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (ENTRY % ("x.png", "a", "b"), r"x.json:3 \(1\): no such file .*x.png"),
        (ENTRY % ("000.png", "a", "a"), r"x.json:3 \(1\): caption and negative_caption are the same: 'a'"),
        (ENTRY % ("000.png", "", "a"), r"x.json:3 \(1\): 'caption' is empty"),
        ('{"filename": "000.png"}', r"x.json:3 \(1\): no 'caption'; it has filename"),
        ('{"filename": "000.png", "caption": 3}', r"x.json:3 \(1\): 'caption' is 3, not str"),
        ('"word"', r"x.json:3 \(1\): JSON str where an object"),
    ],
)
def test_bad_entries_are_named(clip_artifact, scenes, second, message, tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{\n"0": ' + ENTRY % ("000.png", "red", "blue") + ',\n"1": ' + second + "\n}")
    with pytest.raises(DataError, match=message):
        evaluate(clip_artifact, "compositional", [path, scenes.root / "images"])


def test_bad_places(clip_artifact, dino_artifact, scenes, crepe, tmp_path):
    with pytest.raises(DataError, match=r"colour.json:1 \(0\): there is no image '000.png' in .*second --data"):
        evaluate(clip_artifact, "compositional", [crepe])
    with pytest.raises(DataError, match="no such file or folder"):
        evaluate(clip_artifact, "compositional", [tmp_path / "none.json"])
    with pytest.raises(DataError, match="is no folder: the second --data"):
        evaluate(clip_artifact, "compositional", [crepe, crepe / "colour.json"])
    (tmp_path / "one.json").write_text("{" + '"0": ' + ENTRY % ("000.png", "red", "blue") + "}")
    with pytest.raises(DataError, match="1 usable sample"):
        evaluate(clip_artifact, "compositional", [tmp_path / "one.json", scenes.root / "images"])
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(DataError, match="no entry in it"):
        evaluate(clip_artifact, "compositional", [tmp_path / "one.json", scenes.root / "images"])
    with pytest.raises(InputError, match="'compositional' does not fit Dinov2Model"):
        evaluate(dino_artifact, "compositional", [crepe])
