"""Calibration data: what a set of samples promises, and what reading it costs."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import subprocess
import sys
import tracemalloc
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from data.making import (
    encoded,
    everything,
    fill,
    picture,
    put,
    reasons,
    shard,
    texts,
    tone,
    wav,
)
from PIL import Image

from latte_convert.data import samples as data_module
from latte_convert.data.samples import Skipped, open_samples
from latte_convert.errors import DataError, UsageError


def test_ids_hashes_and_values_of_a_nested_folder(tmp_path: Path) -> None:
    a = put(tmp_path / "cat" / "1.PNG", encoded(picture(1)))
    b = put(tmp_path / "dog" / "deep" / "1.JpG", encoded(picture(2), "JPEG"))
    found = everything(tmp_path, "image")
    assert {s.id: s.sha256 for s in found} == {
        "cat/1.PNG": hashlib.sha256(a.read_bytes()).hexdigest(),
        "dog/deep/1.JpG": hashlib.sha256(b.read_bytes()).hexdigest(),
    }
    assert found.skipped == ()
    assert (found.modality, found.source, found.requested) == ("image", str(tmp_path), 2000)
    values = {s.id: s.value for s in found}
    np.testing.assert_array_equal(np.asarray(values["cat/1.PNG"]), np.asarray(picture(1)))


def test_sequence_protocol(tmp_path: Path) -> None:
    found = open_samples(fill(tmp_path, 5), "image", samples=5)
    assert [s.id for s in found] == [found[i].id for i in range(5)] == list(found.ids)
    assert found[-1].id == found.ids[4]
    with pytest.raises(IndexError):
        found[5]


def test_order_is_seeded_and_not_that_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 30)
    first = open_samples(tmp_path, "image", samples=8)
    walk = os.walk

    def shuffled(*args: object, **options: object):  # type: ignore[no-untyped-def]
        for folder, subfolders, names in walk(*args, **options):  # type: ignore[call-overload]
            random.Random(7).shuffle(names)
            yield folder, subfolders, names

    monkeypatch.setattr(os, "walk", shuffled)
    again = open_samples(tmp_path, "image", samples=8)
    assert again.ids == first.ids
    assert again.fingerprint() == first.fingerprint()
    assert first.ids != tuple(sorted(first.ids))
    assert open_samples(tmp_path, "image", samples=8, seed=1).ids != first.ids


def test_a_file_that_goes_leaves_the_order_of_the_rest(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    before = open_samples(tmp_path, "image", samples=20).ids
    (tmp_path / before[3]).unlink()
    assert open_samples(tmp_path, "image", samples=19).ids == before[:3] + before[4:]


def test_fingerprint_is_the_hash_of_the_sorted_pairs(tmp_path: Path) -> None:
    put(tmp_path / "b.txt", b"two")
    put(tmp_path / "a.txt", b"one")
    one, two = (hashlib.sha256(t).hexdigest() for t in (b"one", b"two"))
    expected = hashlib.sha256(f"a.txt\0{one}\nb.txt\0{two}\n".encode()).hexdigest()
    assert {everything(tmp_path, "text", seed=s).fingerprint() for s in range(6)} == {expected}
    put(tmp_path / "a.txt", b"One")
    assert everything(tmp_path, "text").fingerprint() != expected


def test_split_holds_out_the_last_of_the_seeded_order(tmp_path: Path) -> None:
    found = open_samples(fill(tmp_path, 10), "image", samples=10)
    fit, held = found.split(3)
    assert fit.ids == found.ids[:7]
    assert held.ids == found.ids[7:]
    assert not {s.sha256 for s in fit} & {s.sha256 for s in held}
    assert (held.requested, held.skipped) == (found.requested, found.skipped)
    whole, none = found.split(0)
    assert whole.ids == found.ids
    assert len(none) == 0
    with pytest.raises(DataError, match="hold out at most 9"):
        found.split(10)
    with pytest.raises(UsageError, match="0 or more"):
        found.split(-1)


def test_equal_contents_count_once(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "sub/a.png"):
        put(tmp_path / name, encoded(picture(0)))
    put(tmp_path / "other.png", encoded(picture(1)))
    found = everything(tmp_path, "image", strict=True)  # a duplicate is no fault
    assert len(found) == 2
    kept = next(name for name in found.ids if name != "other.png")
    assert set(reasons(found).values()) == {f"same content as {kept}"}
    assert len(found.skipped) == 2


def test_fewer_than_asked_warns_and_min_samples_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, 3)
    put(tmp_path / "bad.png", b"")
    with caplog.at_level(logging.WARNING, logger="latte_convert"):
        assert len(open_samples(tmp_path, "image", samples=128)) == 3
    assert "128 asked, 3 usable, 1 skipped" in caplog.text
    with pytest.raises(DataError, match=r"3 usable.*at least 4 needed.*bad\.png: empty file"):
        open_samples(tmp_path, "image", samples=128, min_samples=4)


def test_enough_says_nothing_and_stops_looking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, 6)
    assert len(open_samples(tmp_path, "image", samples=6)) == 6
    assert caplog.records == []


def test_no_usable_sample_gives_count_and_first_reasons(tmp_path: Path) -> None:
    for number in range(5):
        put(tmp_path / f"{number}.jpg", b"")
    with pytest.raises(DataError) as caught:
        open_samples(tmp_path, "image", samples=4)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "5 tried" in message
    assert message.count("empty file") == 3


def test_strict_fails_on_the_first_bad_one(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    put(tmp_path / "bad.png", b"no image")
    with pytest.raises(DataError, match=r"bad\.png: not an image"):
        open_samples(tmp_path, "image", samples=4, strict=True)


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"samples": 2, "min_samples": 3}, {"samples": 1, "sampling_rate": 0}]
)
def test_numbers_without_sense(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        open_samples(fill(tmp_path, 1), "image", **options)


def test_content_that_changes_after_opening_is_an_error(tmp_path: Path) -> None:
    found = open_samples(fill(tmp_path, 2), "image", samples=2)
    put(tmp_path / found.ids[0], encoded(picture(99)))
    (tmp_path / found.ids[1]).unlink()
    with pytest.raises(DataError, match="has changed"):
        found[0]
    with pytest.raises(DataError, match=r"has changed.*No such file"):
        found[1]


def test_decoded_images_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 300)
    alive: weakref.WeakValueDictionary[int, Image.Image] = weakref.WeakValueDictionary()
    most = 0
    decode = data_module.decode

    def counted(*args: object) -> object:
        nonlocal most
        value = decode(*args)  # type: ignore[arg-type]
        assert isinstance(value, Image.Image)
        alive[id(value)] = value
        most = max(most, len(alive))
        return value

    monkeypatch.setattr(data_module, "decode", counted)
    peaks = {}
    for samples in (8, 300):
        most = 0
        found = open_samples(tmp_path, "image", samples=samples)
        assert len({sample.value.size for sample in found}) == 1  # type: ignore[union-attr]
        gc.collect()
        peaks[samples] = (most, len(alive))
    assert peaks[300] == peaks[8]
    assert peaks[300][0] <= 2  # the one in the loop's hand and the next
    assert peaks[300][1] == 0


def test_host_memory_does_not_grow_with_samples(tmp_path: Path) -> None:
    for number in range(120):
        put(tmp_path / f"{number}.wav", wav(tone(20_000, hertz=100 + number)))
    peaks = []
    for samples in (8, 120):
        tracemalloc.start()
        for _ in range(2):
            assert sum(s.value.size for s in open_samples(tmp_path, "audio", samples=samples)) > 0  # type: ignore[union-attr]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # One waveform is 80 kB: 112 more would be 9 MB, while their ids and hashes are some 30 kB.
    assert peaks[1] < peaks[0] + 160_000


def test_reading_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    home = tmp_path / "home"
    home.mkdir()
    for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(home))
    data = fill(tmp_path / "data", 3)
    put(data / "d.csv", b"text\na\nb\n")
    pq.write_table(pa.table({"text": ["a", "b"]}), data / "d.parquet")
    shard(data / "d.tar", {"a.txt": b"a"})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for source, modality in (
        (data, "image"),
        *((data / f"d.{s}", "text") for s in ("csv", "parquet", "tar")),
    ):
        assert list(everything(source, modality))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_import_is_light() -> None:
    heavy = ("torch", "datasets", "pyarrow", "soundfile", "soxr", "fsspec")
    code = f"import sys, latte_convert.data.samples; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_real_photos(photos: Path) -> None:
    found = open_samples(photos, "image", samples=15, strict=True)
    assert {s.id: s.value.size for s in found}.items() >= {  # type: ignore[union-attr]
        "astronaut.jpg": (352, 352),
        "cameraman.jpg": (320, 320),  # greyscale in its file
        "cat-left.jpg": (225, 300),
        "coffee.jpg": (420, 280),
        "rocket.jpg": (300, 427),
    }.items()
    assert {s.value.mode for s in found} == {"RGB"}  # type: ignore[union-attr]


def test_real_photos_in_a_dirty_folder(photos: Path, tmp_path: Path) -> None:
    whole = sorted(photos.iterdir())[:6]
    for photo in whole:
        put(tmp_path / "good" / photo.name, photo.read_bytes())
        put(tmp_path / "cut" / photo.name, photo.read_bytes()[:-5000])
    archive = tmp_path / "photos.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(whole[0])
    put(tmp_path / "zip_named.jpg", archive.read_bytes())
    found = everything(tmp_path, "image")
    assert sorted(found.ids) == [f"good/{photo.name}" for photo in whole]
    assert len(found.skipped) == 7
    assert Skipped("zip_named.jpg", "not an image, or of a format Pillow cannot read") in found.skipped


def test_real_speech(speech: Path) -> None:
    found = open_samples(speech, "audio", samples=3, sampling_rate=8000, strict=True)
    lengths = {path.name: soundfile.info(path).duration for path in speech.glob("*.wav")}
    assert {s.id: s.value.shape for s in found} == {  # type: ignore[union-attr]
        name: (round(8000 * seconds),) for name, seconds in lengths.items()
    }
    table = speech / "metadata.csv"
    by_table = open_samples(table, "audio", samples=3, sampling_rate=8000)
    assert {s.sha256 for s in by_table} == {s.sha256 for s in found}
    assert texts(everything(table, "text"))["metadata.csv:4"] == "Please close the window, it is cold outside."


def test_real_sentences_without_header(sentences: Path) -> None:
    values = texts(everything(sentences, "text", strict=True))
    assert len(values) == 20
    assert values["sentences.csv:1"] == "A man is playing the guitar on a bench."
    assert values["sentences.csv:4"] == "Two boys, both in red shirts, are playing football."
