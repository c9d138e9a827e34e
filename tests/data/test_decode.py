"""Images and sounds of every format and every kind of damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data.making import (
    BLUE,
    GREEN,
    RED,
    WHITE,
    encoded,
    everything,
    only,
    picture,
    put,
    reasons,
    tone,
    wav,
)
from PIL import Image

from latte_convert.data.samples import open_samples
from latte_convert.errors import DataError


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
    assert why["nan.wav"] == "audio with samples of nan, where 1 is full scale"
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


def test_sixteen_bits_are_rounded_and_not_cut(tmp_path: Path) -> None:
    levels = np.array([[0, 4095, 32896, 65406, 65407, 65535]], dtype=np.uint16)  # 4095 of 65535 is 15.93 of 255
    put(tmp_path / "x.png", encoded(Image.fromarray(levels)))
    image = only(tmp_path, "image")
    assert isinstance(image, Image.Image)
    assert np.asarray(image)[0, :, 0].tolist() == [0, 16, 128, 254, 255, 255]


def test_an_eps_that_is_called_png_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", None)  # a call would be a TypeError
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    put(tmp_path / "a.png", page)
    put(tmp_path / "b.png", encoded(picture(0)))
    assert "of a format Pillow cannot read" in reasons(everything(tmp_path, "image"))["a.png"]


def test_sounds_that_are_none(tmp_path: Path) -> None:
    put(tmp_path / "one_hertz.wav", wav(tone(8000), rate=1))
    put(tmp_path / "loud.wav", wav(np.array([0.1, 1e30], np.float32)))
    put(tmp_path / "clipped.wav", wav(np.array([0.1, 1.5], np.float32)))
    header = bytearray(wav(tone(100), subtype="PCM_16"))
    put(tmp_path / "long.wav", bytes(header).replace((16000).to_bytes(4, "little"), (1000).to_bytes(4, "little"), 1))
    found = everything(tmp_path, "audio", sampling_rate=16000)
    assert set(found.ids) == {"clipped.wav", "long.wav"}
    assert reasons(found)["one_hertz.wav"] == "a sampling rate of 1 Hz; 1,000 to 1,000,000 Hz are read"
    assert reasons(found)["loud.wav"].startswith("audio with samples of 5e+29") or "1e+30" in reasons(found)["loud.wav"]


def test_a_sound_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latte_convert.data.decode._MOST_FRAMES", 16_000)
    put(tmp_path / "a.wav", wav(tone(1001), rate=1000))
    put(tmp_path / "b.wav", wav(tone(1000), rate=1000))
    found = everything(tmp_path, "audio", sampling_rate=16000)
    assert found.ids == ("b.wav",)
    assert "hours of audio; cut it" in reasons(found)["a.wav"]
