from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import latte_convert
from latte_convert.errors import DataError, InputError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.zero_shot import read_templates

pytestmark = pytest.mark.slow

TEMPLATES = ("two digits , a {} at the top left", "a {} at the bottom right")


@pytest.fixture(scope="module")
def digits(scenes, tmp_path_factory):
    """Scenes in folders that say which digit is the largest: ``red_seven``."""
    root = tmp_path_factory.mktemp("digits")
    for name, (one, _) in scenes.captions.items():
        _, colour, digit, *_ = one.split(" , ")[1].split()
        folder = root / f"{colour}_{digit}"
        folder.mkdir(exist_ok=True)
        shutil.copy(scenes.root / "images" / name, folder)
    return root


@torch.no_grad()
def by_hand(model, folder, root, templates):
    """Share of images whose class has the highest mean prompt; and of those where it is in the first five."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.CLIPImageProcessor.from_pretrained(folder)
    names = sorted(path.name for path in root.iterdir())
    weights = []
    for name in names:
        words = tokenizer([t.format(name.replace("_", " ")) for t in templates], padding=True, return_tensors="pt")
        vectors = torch.nn.functional.normalize(model.get_text_features(**words).pooler_output, dim=-1)
        weights.append(torch.nn.functional.normalize(vectors.mean(0), dim=-1))
    first, five = [], []
    for path in sorted(root.rglob("*.png")):
        pixels = processor(Image.open(path), return_tensors="pt")["pixel_values"]
        order = (torch.stack(weights) @ model.get_image_features(pixels).pooler_output[0]).argsort(descending=True)
        guesses = [names[i] for i in order]
        first.append(guesses[0] == path.parent.name)
        five.append(path.parent.name in guesses[:5])
    return np.mean(first), np.mean(five), len(first)


@pytest.mark.parametrize("templates", [TEMPLATES, None])
def test_accuracy_by_hand(clip_artifact, tiny_models, digits, templates, tmp_path):
    path = None
    if templates:
        path = tmp_path / "templates.txt"
        path.write_text("\n".join(templates) + "\n\n")
    report = evaluate(clip_artifact, "zero-shot", [digits], templates=path, batch_size=30)
    original = transformers.CLIPModel.from_pretrained(tiny_models / "tiny-clip").eval()
    for which, model in (("original", original), ("hybrid", latte_convert.load(clip_artifact))):
        first, five, count = by_hand(model, tiny_models / "tiny-clip", digits, templates or ["a photo of a {}."])
        assert getattr(report.metrics["accuracy"], which) == pytest.approx(first)
        assert getattr(report.metrics["top5"], which) == pytest.approx(five)
        assert report.samples == count == 60
    if templates:
        assert report.metrics["accuracy"].original > 0.1  # chance: one of about 45


def test_samples_limits_images_and_no_class(clip_artifact, digits):
    report = evaluate(clip_artifact, "zero-shot", [digits], samples=9)
    assert report.samples == 9
    assert "top5" in report.metrics


def test_real_photographs_and_their_test_part(clip_artifact, subjects):
    whole = evaluate(clip_artifact, "zero-shot", [subjects])
    assert whole.samples == 12
    assert set(whole.metrics) == {"accuracy"}  # three classes have no top 5
    assert whole.metrics == evaluate(clip_artifact, "zero-shot", [subjects / "test"]).metrics


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a photo of a {}.\na photo\n", r"templates.txt:2: 'a photo' needs \{\} once"),
        ("{} and {}\n", r"templates.txt:1: '\{\} and \{\}' needs \{\} once"),
        ("\n", "has no template"),
    ],
)
def test_bad_templates(clip_artifact, subjects, text, message, tmp_path):
    path = tmp_path / "templates.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        evaluate(clip_artifact, "zero-shot", [subjects], templates=path)
    with pytest.raises(DataError, match=r"templates cannot be read.*nearest: templates.txt"):
        read_templates(tmp_path / "template.txt")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"endless.txt: templates cannot be read: it is a device"):
        read_templates(tmp_path / "endless.txt")


def test_bad_folders(clip_artifact, dino_artifact, subjects, tmp_path):
    with pytest.raises(InputError, match="'zero-shot' does not fit Dinov2Model: it takes image, not images and texts"):
        evaluate(dino_artifact, "zero-shot", [subjects])
    root = tmp_path / "data"
    shutil.copytree(subjects / "test" / "cat", root / "long_cat")
    with pytest.raises(DataError, match=r"images of one class only \('long_cat'\)"):
        evaluate(clip_artifact, "zero-shot", [root])
    shutil.copytree(subjects / "test" / "cat", root / "long cat")
    with pytest.raises(DataError, match="'long_cat' and 'long cat' give the same prompt"):
        evaluate(clip_artifact, "zero-shot", [root])
    shutil.copy(next((root / "long cat").iterdir()), root)
    with pytest.raises(DataError, match=r"\.jpg has no label"):
        evaluate(clip_artifact, "zero-shot", [root])
