"""Calibration data: every kind of dirt a folder, a table or an archive comes with."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tarfile
import tracemalloc
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from latte_convert.data import samples as data_module
from latte_convert.data.samples import SampleSet, Skipped, open_samples
from latte_convert.errors import DataError, UsageError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(seed: int, size: tuple[int, int] = (16, 12)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def fill(folder: Path, count: int) -> Path:
    for number in range(count):
        put(folder / f"{number:03d}.png", encoded(picture(number)))
    return folder


def wav(waveform: np.ndarray, rate: int = 16000, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, waveform, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def tone(frames: int, rate: int = 16000, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(frames) / rate)).astype(np.float32)


def everything(source: Path | str, modality: str, **options: object) -> SampleSet:
    """All usable samples: more are asked for than there are."""
    return open_samples(source, modality, samples=2000, **options)  # type: ignore[arg-type]


def only(source: Path | str, modality: str, **options: object) -> object:
    found = everything(source, modality, **options)
    assert len(found) == 1
    return found[0].value


def reasons(found: SampleSet) -> dict[str, str]:
    return {item.id: item.reason for item in found.skipped}


def texts(found: SampleSet) -> dict[str, object]:
    return {sample.id: sample.value for sample in found}


# --- the contract -------------------------------------------------------------------------------------------


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


# --- images -------------------------------------------------------------------------------------------------


def test_damaged_images_are_skipped_by_name(tmp_path: Path) -> None:
    whole = encoded(picture(0, (64, 64)), "JPEG")
    put(tmp_path / "whole.jpg", whole)
    put(tmp_path / "cut.jpg", whole[: len(whole) // 2])
    put(tmp_path / "cut.png", encoded(picture(1, (64, 64)))[:-200])
    put(tmp_path / "empty.jpg", b"")
    put(tmp_path / "text.jpg", b"<html>404 Not Found</html>")
    put(tmp_path / "cut_header.gif", encoded(picture(3), "GIF")[:8])
    (tmp_path / "broken_link.jpg").symlink_to(tmp_path / "gone.jpg")
    found = everything(tmp_path, "image")
    assert found.ids == ("whole.jpg",)
    why = reasons(found)
    assert sorted(why) == ["broken_link.jpg", "cut.jpg", "cut.png", "cut_header.gif", "empty.jpg", "text.jpg"]
    assert "truncated" in why["cut.jpg"]
    assert why["empty.jpg"] == "empty file"
    assert "not an image" in why["text.jpg"]
    assert "No such file" in why["broken_link.jpg"]


def palette_with_alpha() -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putdata([0, 1])
    return encoded(image, transparency=bytes([255, 0]))  # red is opaque, green is not there


def half_transparent() -> bytes:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    return encoded(image)


def sixteen_bit(kind: str) -> bytes:
    return encoded(Image.fromarray(np.array([[0x0000, 0x80FF]], dtype=np.uint16)), kind)


def grey_with_alpha() -> bytes:
    image = Image.new("LA", (2, 1), (10, 255))
    image.putpixel((1, 0), (10, 0))
    return encoded(image)


@pytest.mark.parametrize(
    ("name", "content", "pixels"),
    [
        ("palette_alpha.png", palette_with_alpha(), [RED, WHITE]),
        ("rgba.png", half_transparent(), [RED, WHITE]),
        ("grey_alpha.png", grey_with_alpha(), [(10, 10, 10), WHITE]),
        ("grey.png", encoded(Image.new("L", (2, 1), 77)), [(77, 77, 77)] * 2),
        ("bilevel.png", encoded(Image.new("1", (2, 1), 1)), [WHITE] * 2),
        ("sixteen.png", sixteen_bit("PNG"), [(0, 0, 0), (128, 128, 128)]),
        ("sixteen.tiff", sixteen_bit("TIFF"), [(0, 0, 0), (128, 128, 128)]),
        ("cmyk.tif", encoded(Image.new("CMYK", (2, 1), (0, 255, 255, 0)), "TIFF"), [RED] * 2),
        (
            "animated.gif",
            encoded(
                Image.new("RGB", (2, 1), RED), "GIF", save_all=True, append_images=[Image.new("RGB", (2, 1), BLUE)]
            ),
            [RED] * 2,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_pixel_format_becomes_rgb(
    tmp_path: Path, name: str, content: bytes, pixels: list[tuple[int, int, int]]
) -> None:
    put(tmp_path / name, content)
    image = only(tmp_path, "image")
    assert isinstance(image, Image.Image)
    assert image.mode == "RGB"
    assert [image.getpixel((x, 0)) for x in range(2)] == pixels


def test_cmyk_jpeg(tmp_path: Path) -> None:
    put(tmp_path / "print.jpg", encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    image = only(tmp_path, "image")
    assert isinstance(image, Image.Image)
    np.testing.assert_allclose(np.asarray(image).reshape(-1, 3), [RED] * 256, atol=6)


@pytest.mark.parametrize("pixels", [np.zeros((2, 2), np.float32), np.full((2, 2), 70000, np.int32)])
def test_pixels_without_a_range_are_skipped(tmp_path: Path, pixels: np.ndarray) -> None:
    put(tmp_path / "depth.tiff", encoded(Image.fromarray(pixels), "TIFF"))
    with pytest.raises(DataError, match=r"depth\.tiff: .* no fixed range"):
        open_samples(tmp_path, "image", samples=1)


# Where a red mark in the stored top left corner belongs, by the EXIF specification: the values of tag 274
# name the sides of the scene that row 0 and column 0 are.
@pytest.mark.parametrize(
    ("orientation", "size", "corner"),
    [
        (1, (24, 16), (0, 0)),
        (2, (24, 16), (1, 0)),
        (3, (24, 16), (1, 1)),
        (4, (24, 16), (0, 1)),
        (5, (16, 24), (0, 0)),
        (6, (16, 24), (1, 0)),
        (7, (16, 24), (1, 1)),
        (8, (16, 24), (0, 1)),
    ],
)
def test_exif_orientation_is_applied(
    tmp_path: Path, orientation: int, size: tuple[int, int], corner: tuple[int, int]
) -> None:
    stored = Image.new("RGB", (24, 16), BLUE)
    stored.paste(RED, (0, 0, 8, 8))
    exif = Image.Exif()
    exif[274] = orientation
    put(tmp_path / "photo.jpg", encoded(stored, "JPEG", exif=exif, quality=95, subsampling=0))
    image = only(tmp_path, "image")
    assert isinstance(image, Image.Image)
    assert image.size == size
    assert image.getexif().get(274, 1) == 1  # a processor that looks again must not turn it twice
    for right in (0, 1):
        for bottom in (0, 1):
            pixel = image.getpixel(((size[0] - 7) * right + 3, (size[1] - 7) * bottom + 3))
            np.testing.assert_allclose(pixel, RED if (right, bottom) == corner else BLUE, atol=6)


@pytest.mark.parametrize("limit", [100, 200])  # Pillow warns above its limit and raises above twice that
def test_decompression_bomb_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    put(tmp_path / "bomb.png", encoded(Image.new("RGB", (19, 19))))
    put(tmp_path / "small.png", encoded(Image.new("RGB", (8, 8))))
    found = everything(tmp_path, "image")
    assert found.ids == ("small.png",)
    assert "too many pixels" in reasons(found)["bomb.png"]


# --- folders ------------------------------------------------------------------------------------------------


def test_hidden_files_and_archive_droppings_do_not_count(tmp_path: Path) -> None:
    root = tmp_path / ".hidden_root_is_fine"
    put(root / "a.png", encoded(picture(0)))
    for name in (".DS_Store", "._a.png", ".cache/b.png", "__MACOSX/._a.png", "__MACOSX/c.png", "sub/.d.png"):
        put(root / name, encoded(picture(1)))
    found = everything(root, "image", strict=True)
    assert found.ids == ("a.png",)
    assert found.skipped == ()


def test_equal_stems_in_two_folders_are_two_samples(tmp_path: Path) -> None:
    names = ("a/1.png", "b/1.png", "b/1.jpg")
    for number, name in enumerate(names):
        put(tmp_path / name, encoded(picture(number), "JPEG" if name.endswith("jpg") else "PNG"))
    assert sorted(everything(tmp_path, "image").ids) == sorted(names)


def test_link_loops_end_and_linked_folders_are_read(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    put(root / "sub" / "a.png", encoded(picture(0)))
    put(elsewhere / "b.png", encoded(picture(1)))
    (root / "sub" / "loop").symlink_to(root)
    (root / "self.png").symlink_to(root / "self.png")
    (root / "linked").symlink_to(elsewhere)
    found = everything(root, "image")
    assert sorted(found.ids) == ["linked/b.png", "sub/a.png"]
    assert list(reasons(found)) == ["self.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    os.mkfifo(tmp_path / "pipe.png")
    assert everything(tmp_path, "image").ids == ("000.png",)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are Unicode on this system")
def test_file_name_that_is_not_unicode(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")).write_bytes(encoded(picture(0)))
    found = everything(tmp_path, "image")
    assert found.ids == ("caf\\udce9.png",)
    assert json.loads(json.dumps(found.ids[0]).encode("utf-8")) == found[0].id


def test_folder_of_another_modality_says_what_is_there(tmp_path: Path) -> None:
    for number in range(13):
        put(tmp_path / f"{number}.WAV", wav(tone(100)))
    put(tmp_path / "LICENSE", b"free")
    put(tmp_path / "metadata.csv", b"file_name,text\n")
    with pytest.raises(DataError, match=r"13 \.wav files, .*this model takes images") as caught:
        open_samples(tmp_path, "image", samples=2)
    assert f"{tmp_path}/metadata.csv" in str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    put(tmp_path / ".DS_Store", b"x")
    with pytest.raises(DataError, match=r"is empty .*this model takes audio"):
        open_samples(tmp_path, "audio", samples=2)


def test_missing_path_names_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"no such file or folder: .*photoz .*nearest: photos"):
        open_samples(tmp_path / "photoz", "image", samples=1)
    with pytest.raises(DataError, match=r"'photoz' in .*nearest: photos"):
        open_samples(tmp_path / "photoz" / "train" / "deep", "image", samples=1)


@pytest.mark.parametrize("name", ["./x", "../x", "/x", "x/", "~/x-is-not-there", "x.txt", "x.JPG", "a/b", "x"])
def test_nothing_but_the_prefix_goes_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "HubRows", None)  # a call would be a TypeError
    with pytest.raises(DataError, match="no such file or folder") as caught:
        open_samples(name, "image", samples=1)
    assert ("write hf:" in str(caught.value)) == (name in ("a/b", "x"))


def test_one_file_and_unknown_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give the folder"):
        open_samples(put(tmp_path / "a.png", encoded(picture(0))), "image", samples=1)
    with pytest.raises(DataError, match=r"cannot read samples from a \.xlsx file.*\.jsonl"):
        open_samples(put(tmp_path / "a.xlsx", b"PK"), "text", samples=1)
    with pytest.raises(DataError, match="is a text file; this model takes images"):
        open_samples(put(tmp_path / "a.txt", b"hello"), "image", samples=1)
    with pytest.raises(UsageError, match="no data given"):
        open_samples("", "text", samples=1)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    fill(tmp_path / "photos", 1)
    assert everything("~/photos", "image").ids == ("000.png",)


# --- audio --------------------------------------------------------------------------------------------------


def test_damaged_audio_is_skipped_and_silence_is_not(tmp_path: Path) -> None:
    put(tmp_path / "corrupt.wav", b"RIFF\x24\x00\x00\x00WAVEgarbage" + bytes(range(200)))
    put(tmp_path / "text.wav", b"not audio at all")
    put(tmp_path / "zero.wav", b"")
    put(tmp_path / "no_frames.wav", wav(np.zeros(0, np.float32)))
    put(tmp_path / "nan.wav", wav(np.array([0.1, np.nan], np.float32)))
    put(tmp_path / "silence.wav", wav(np.zeros(400, np.float32)))
    found = everything(tmp_path, "audio", sampling_rate=16000)
    assert found.ids == ("silence.wav",)
    why = reasons(found)
    assert why["zero.wav"] == "empty file"
    assert "zero frames" in why["no_frames.wav"]
    assert "NaN" in why["nan.wav"]
    assert "not audio" in why["text.wav"]
    assert "not audio" in why["corrupt.wav"]


def test_stereo_becomes_the_mean_of_its_channels(tmp_path: Path) -> None:
    put(tmp_path / "stereo.WAV", wav(np.stack([np.full(50, 0.5), np.full(50, -0.25)], axis=1)))
    waveform = only(tmp_path, "audio")
    assert isinstance(waveform, np.ndarray)
    assert waveform.dtype == np.float32
    np.testing.assert_array_equal(waveform, np.full(50, 0.125, np.float32))


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_resampling_keeps_the_tone(tmp_path: Path, rate: int) -> None:
    put(tmp_path / "a.flac", wav(tone(rate, rate), rate, "FLAC", "PCM_16"))
    waveform = only(tmp_path, "audio", sampling_rate=16000)
    assert isinstance(waveform, np.ndarray)
    assert waveform.shape == (16000,)
    # Away from the ends, where a filter sees silence, it is the same sine as one sampled at 16 kHz.
    np.testing.assert_allclose(waveform[1000:-1000], tone(16000)[1000:-1000], atol=2e-3)
    native = only(tmp_path, "audio")
    assert isinstance(native, np.ndarray)
    assert native.shape == (rate,)


# --- text ---------------------------------------------------------------------------------------------------


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst\r\n\r\n   \nsecond \xc3\xa9\nbad \xff\xfe\nsecond \xc3\xa9\nlast"
    found = everything(put(tmp_path / "t.txt", content), "text")
    values = texts(found)
    assert values.pop("t.txt:1") == "first"
    assert values.pop("t.txt:7") == "last"
    assert list(values.values()) == ["second é"]  # of lines 4 and 6
    assert reasons(found)["t.txt:5"] == "not UTF-8: byte 0xff at position 4"
    assert "same content as t.txt:" in (reasons(found).get("t.txt:4") or reasons(found)["t.txt:6"])
    assert found[0].sha256 == hashlib.sha256(str(found[0].value).encode()).hexdigest()


def test_files_of_a_text_folder(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")
    put(tmp_path / "blank.txt", b" \n\n")
    put(tmp_path / "latin.txt", "é".encode("latin-1"))
    put(tmp_path / "wide.txt", "wide".encode("utf-16-le"))
    found = everything(tmp_path, "text")
    assert texts(found) == {"a.txt": "one\ntwo"}
    assert found[0].sha256 == hashlib.sha256(b"\xef\xbb\xbfone\r\ntwo\r\n").hexdigest()
    assert reasons(found) == {
        "blank.txt": "no text in it",
        "latin.txt": "not UTF-8: byte 0xe9 at position 0",
        "wide.txt": "binary data or UTF-16, not UTF-8 text",
    }


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\r\n\n  \n"])
def test_file_without_lines(tmp_path: Path, suffix: str, content: bytes) -> None:
    with pytest.raises(DataError, match="is empty"):
        open_samples(put(tmp_path / f"t{suffix}", content), "text", samples=1)


def test_bad_lines_of_jsonl_are_skipped_by_line(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"text": "one"}',
        "",
        '{"text": "two", "caption": "not this"}',
        '{"txt": "wrong key"}',
        '{"text": "cut',
        '["a list"]',
        '{"text": 5}',
        '{"text": null}',
        '{"text": "\\ud800"}',
        "[" * 100_000,
    ]
    found = everything(put(tmp_path / "d.jsonl", "\r\n".join(lines).encode()), "text")
    assert texts(found) == {"d.jsonl:1": "one", "d.jsonl:3": "two"}
    why = reasons(found)
    assert sorted(why) == ["d.jsonl:10", *(f"d.jsonl:{n}" for n in range(4, 10))]
    assert why["d.jsonl:4"] == "no key 'text'; it has 'txt'"
    assert "not valid JSON" in why["d.jsonl:5"]
    assert why["d.jsonl:7"] == "int where text should be"
    with pytest.raises(DataError, match=r"d\.jsonl:\d+: "):
        open_samples(tmp_path / "d.jsonl", "text", samples=9, strict=True)


def test_wrong_key_on_all_lines_names_those_found(tmp_path: Path) -> None:
    path = put(tmp_path / "d.jsonl", b'{"headline": "a", "n": 1}\n{"headline": "b", "m": 2}\n')
    with pytest.raises(DataError, match=r"it has 'headline', 'n', 'm'\. Rename one to 'text'"):
        open_samples(path, "text", samples=1)
    with pytest.raises(DataError, match=r"no line holds a JSON object .*d\.jsonl:1: not valid JSON"):
        open_samples(put(tmp_path / "d.jsonl", b"hello\nthere\n"), "text", samples=1)


@pytest.mark.parametrize(
    ("header", "column"),
    [("id,Text", 1), ("caption,sentence", 1), (" transcript ,label", 0), ("s1,s2,score", 0)],
)
def test_csv_column_choice(tmp_path: Path, header: str, column: int) -> None:
    path = put(tmp_path / "d.csv", f"{header}\nx0,y0,3\nx1,y1,4\n".encode())
    assert texts(everything(path, "text")) == {f"d.csv:{n + 2}": f"{'xy'[column]}{n}" for n in range(2)}


def test_csv_without_header_reads_the_first_column(tmp_path: Path) -> None:
    path = put(tmp_path / "d.csv", b'"One, two.",b,2.5\nthree,d,1\n')
    assert texts(everything(path, "text")) == {"d.csv:1": "One, two.", "d.csv:2": "three"}
    path = put(tmp_path / "d.csv", b"a girl is brushing\nshort\n")
    assert texts(everything(path, "text")) == {"d.csv:1": "a girl is brushing", "d.csv:2": "short"}


def test_csv_with_unknown_header_names_the_columns(tmp_path: Path) -> None:
    path = put(tmp_path / "d.csv", b"headline,label\na,b\n")
    with pytest.raises(DataError, match="it has 'headline', 'label'"):
        open_samples(path, "text", samples=1)
    with pytest.raises(DataError, match="a header and no rows"):
        open_samples(put(tmp_path / "d.csv", b"text,label\n"), "text", samples=1)


def test_csv_rows_with_quotes_line_ends_and_dirt(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbflabel,text\r\n1,"comma, and ""quotes"""\r\n2,"two\r\nlines"\r\n\r\n'
        b'3\r\n4,\xff\r\n5,  \r\n6,5" disk\r\n7,line\xe2\x80\xa8separator\r\n8,"never closed\r\n9,lost\r\n'
    )
    found = everything(put(tmp_path / "d.csv", content), "text")
    assert texts(found) == {
        "d.csv:2": 'comma, and "quotes"',
        "d.csv:3": "two\nlines",
        "d.csv:8": '5" disk',
        "d.csv:9": "line\u2028separator",
    }
    why = reasons(found)
    assert why["d.csv:5"] == "only 1 columns, number 2 is wanted"
    assert "not UTF-8: byte 0xff" in why["d.csv:6"]
    assert why["d.csv:7"] == "no text in it"
    assert "not a valid CSV row" in why["d.csv:10"]


def test_csv_goes_on_after_an_endless_field(tmp_path: Path) -> None:
    path = put(tmp_path / "d.csv", b"text\nbefore\n" + b"x" * 200_000 + b"\nafter\n")
    found = everything(path, "text")
    assert texts(found) == {"d.csv:2": "before", "d.csv:4": "after"}
    assert "field larger than field limit" in reasons(found)["d.csv:3"]


@pytest.mark.parametrize("column", ["image", "file_name", "path"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_tables_name_files_relative_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, suffix: str
) -> None:
    fill(tmp_path / "img", 2)
    names = ["img/000.png", "img/001.png", "img/gone.png", ""]
    if suffix == ".csv":
        content = f"{column},label\n" + "".join(f"{name},1\n" for name in names)
    else:
        content = "".join(json.dumps({column: name}) + "\n" for name in names)
    put(tmp_path / f"d{suffix}", content.encode())
    monkeypatch.chdir(tmp_path / "img")
    found = everything(f"../d{suffix}", "image")
    first = 2 if suffix == ".csv" else 1
    assert sorted(found.ids) == [f"d{suffix}:{first}", f"d{suffix}:{first + 1}"]
    expected = hashlib.sha256((tmp_path / "img" / "000.png").read_bytes()).hexdigest()
    assert {s.id: s.sha256 for s in found}[f"d{suffix}:{first}"] == expected
    why = reasons(found)
    assert "cannot read gone.png: No such file" in why[f"d{suffix}:{first + 2}"]
    assert "names no file" in why[f"d{suffix}:{first + 3}"]


# --- parquet, tar, hub --------------------------------------------------------------------------------------


def test_parquet_of_images(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fill(tmp_path / "img", 7)
    cells: list[object] = [{"bytes": encoded(picture(n)), "path": f"{n}.png"} for n in range(6)]
    cells += [{"bytes": None, "path": "img/006.png"}, {"bytes": b"", "path": "x.png"}, None]
    pq.write_table(pa.table({"label": list(range(9)), "image": cells}), tmp_path / "d.parquet", row_group_size=4)
    found = everything(tmp_path / "d.parquet", "image")
    assert sorted(found.ids) == [f"d.parquet:{n}" for n in range(7)]
    for sample in found:
        np.testing.assert_array_equal(np.asarray(sample.value), np.asarray(picture(int(sample.id[-1]))))
    assert reasons(found) == {"d.parquet:7": "empty file", "d.parquet:8": "None names no file"}


def test_parquet_of_text_and_damaged_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"caption": [f"t{n}" for n in range(300)]}), tmp_path / "d.parquet")
    assert texts(everything(tmp_path / "d.parquet", "text")) == {f"d.parquet:{n}": f"t{n}" for n in range(300)}
    with pytest.raises(DataError, match="it has 'caption'"):
        open_samples(tmp_path / "d.parquet", "image", samples=1)
    with pytest.raises(DataError, match="not a readable parquet"):
        open_samples(put(tmp_path / "bad.parquet", b"PAR1 no"), "text", samples=1)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        open_samples(tmp_path / "none.parquet", "text", samples=1)


def shard(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_tar_members(tmp_path: Path) -> None:
    members = {f"./k{n}.JPG": encoded(picture(n), "JPEG") for n in range(3)}
    extra = {
        "k0.cls": b"1",
        "k0.txt": b"a caption",
        "._k0.jpg": b"x",
        "__MACOSX/a.jpg": b"x",
        "bad.jpg": b"x",
    }
    path = shard(tmp_path / "d.tar", members | extra)
    found = everything(path, "image")
    assert {s.id: s.sha256 for s in found} == {
        name.removeprefix("./"): hashlib.sha256(content).hexdigest() for name, content in members.items()
    }
    assert list(reasons(found)) == ["bad.jpg"]
    assert texts(everything(path, "text")) == {"k0.txt": "a caption"}
    with pytest.raises(DataError, match=r"\.jpg files.*this model takes audio"):
        open_samples(path, "audio", samples=1)


def test_damaged_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shard(tmp_path / "d.tar", {f"{n}.txt": bytes([65 + n]) * 2000 for n in range(3)})
    put(path, path.read_bytes()[: 512 * (5 + 5 + 1) + 700])  # ends inside the third member
    found = open_samples(path, "text", samples=2)
    assert sorted(found.ids) == ["0.txt", "1.txt"]
    assert "is damaged after" in caplog.text
    with pytest.raises(DataError, match=r"not a plain \.tar"):
        open_samples(shard(tmp_path / "z.tar", {"a.txt": b"a"}, "w:gz"), "text", samples=1)


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


# --- cost ---------------------------------------------------------------------------------------------------


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


# --- real data ----------------------------------------------------------------------------------------------


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
