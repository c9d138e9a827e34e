"""Copies of a sample are told whatever format, size or quality they have, and are not fitted and held out at once."""

from __future__ import annotations

import numpy as np
import pytest
from data.making import encoded, everything, put, reasons, tone, wav
from PIL import Image

from latte_convert.data.decode import BadSample
from latte_convert.data.feed import different
from latte_convert.data.likeness import alike, look
from latte_convert.data.samples import open_samples
from latte_convert.errors import CheckpointError, DataError


@pytest.fixture
def cat(photos):
    return Image.open(photos / "cat.jpg").convert("RGB")


def test_the_same_pixels_in_other_formats_count_once(cat, tmp_path):
    for kind, options in (("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        put(tmp_path / f"cat.{kind.lower()}", encoded(cat, kind, **options))
    found = everything(tmp_path, "image")
    assert len(found) == 1
    assert set(reasons(found).values()) == {f"same content as {found.ids[0]}"}


def test_copies_of_another_size_or_quality_are_one_group(cat, photos):
    copies = [cat, cat.resize((224, 224)), Image.open(photos / "cat.jpg").resize((100, 80)), cat.convert("L")]
    others = [Image.open(path) for path in sorted(photos.glob("*.jpg")) if path.name != "cat.jpg"]
    assert alike([look(image) for image in [*copies, *others]]) == [[0, 1, 2, 3], *([i] for i in range(4, 18))]


def test_copies_of_sounds_and_texts():
    rng = np.random.default_rng(0)
    sounds = [(rng.standard_normal(8000) * np.linspace(0, k, 8000) ** k).astype(np.float32) for k in (1, 3)]
    quieter = (0.5 * sounds[0] + rng.normal(0, 1e-4, 8000)).astype(np.float32)
    assert alike([look(each) for each in (*sounds, quieter)]) == [[0, 2], [1]]
    assert alike([look(each) for each in ("A dog.", "a  DOG", "a dog barks", "")]) == [[0, 1], [2], [3]]
    assert len(look(tone(3))) == 256


@pytest.mark.parametrize("seed", range(5))
def test_copies_stay_on_one_side(seed, photos, tmp_path):
    for path in photos.glob("*.jpg"):
        photo = Image.open(path)
        photo.save(tmp_path / f"{path.stem}.png")
        if "left" in path.stem:
            photo.resize((120, 100)).save(tmp_path / f"{path.stem}-small.jpg")
    found = open_samples(tmp_path, "image", samples=20, seed=seed)
    assert sorted(map(sorted, found.copies)) == sorted(
        [f"{path.stem}-small.jpg", f"{path.stem}.png"] for path in photos.glob("*left.jpg")
    )
    fitted, held = found.split(5)
    assert len(held) == 5
    for copies in found.copies:
        assert len(set(copies) & set(held.ids)) in (0, 2)
    assert [*fitted.ids, *held.ids] != found.ids or not found.copies
    assert sorted([*fitted.ids, *held.ids]) == sorted(found.ids)


def test_without_copies_the_last_are_held_out(photos):
    found = open_samples(photos, "image", samples=12)
    fitted, held = found.split(4)
    assert (fitted.ids, held.ids) == (found.ids[:8], found.ids[8:])


def test_where_all_are_copies_the_last_are_held_out_after_all(cat, tmp_path):
    for side in (100, 150, 200, 250):
        put(tmp_path / f"{side}.png", encoded(cat.resize((side, side))))
    found = everything(tmp_path, "image")
    assert len(found.copies) == 1
    assert found.split(1)[1].ids == found.ids[3:]


def test_repeated_batches_count_once(caplog):
    import torch

    one, other = {"x": torch.zeros(1, 2)}, {"x": torch.ones(1, 2)}
    assert different([one, {"x": one["x"].clone()}, other, {"x": torch.zeros(2, 1)}]) == [
        one, other, {"x": pytest.approx(torch.zeros(2, 1))},
    ]  # fmt: skip
    assert "1 of 4 batches repeat another one" in caplog.text


def refuse(*names):
    def take(sample):
        if sample.id in names:
            raise BadSample("no")

    return take


def test_the_next_sample_stands_in_for_one_that_cannot_be_used(photos):
    order = open_samples(photos, "image", samples=15).ids
    found = open_samples(photos, "image", samples=6).tried(refuse(order[1], order[6]))
    assert found.ids == (order[0], *order[2:6], *order[7:8])
    assert reasons(found) == {order[1]: "no", order[6]: "no"}
    with pytest.raises(DataError, match=f"{order[1]}: no; fix or remove the file, or omit --strict"):
        open_samples(photos, "image", samples=6, strict=True).tried(refuse(order[1]))
    with pytest.raises(DataError, match="15 asked, 14 usable, 1 skipped"):
        open_samples(photos, "image", samples=15, min_samples=15).tried(refuse(order[3]))
    with pytest.raises(CheckpointError, match=r"cannot be run on samples of .* 8 were tried"):
        open_samples(photos, "image", samples=15).tried(refuse(*order))


def test_media_that_are_not_read_are_skipped_by_name(photos, tmp_path):
    for path in list(photos.glob("*.jpg"))[:3]:
        put(tmp_path / path.name, path.read_bytes())
    for name in ("IMG_1.HEIC", "clip.mp4", "sound.wav", "LICENSE", "labels.csv", "notes.json"):
        put(tmp_path / name, wav(tone(10)))
    found = everything(tmp_path, "image")
    assert reasons(found) == {
        "IMG_1.HEIC": "a .heic file, which is not read as images",
        "clip.mp4": "a .mp4 file, which is not read as images",
    }
