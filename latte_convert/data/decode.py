"""From encoded bytes to the sample a model's processor takes: an RGB image, a string, a mono waveform."""

from __future__ import annotations

import io
import warnings
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from latte_convert.compat import require

Modality = Literal["image", "text", "audio"]
Value = Image.Image | str | npt.NDArray[np.float32]

_SUFFIXES: dict[Modality, str] = {
    "image": ".avif .bmp .gif .jfif .jp2 .jpe .jpeg .jpg .pgm .png .pnm .ppm .tif .tiff .webp",
    "text": ".md .text .txt",
    "audio": ".aif .aifc .aiff .au .caf .flac .mp3 .oga .ogg .opus .w64 .wav",
}
SUFFIXES = {modality: frozenset(names.split()) for modality, names in _SUFFIXES.items()}
PLURAL: dict[Modality, str] = {"image": "images", "text": "text", "audio": "audio"}

MOST_BYTES: dict[Modality, int] = {"image": 1 << 28, "text": 1 << 24, "audio": 1 << 30}
"""Of one encoded sample: checked before it is read."""

# Pillow would try all it knows, and hand EPS to Ghostscript, whatever a file is called.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_RATES = range(1_000, 1_000_001)
_MOST_FRAMES = 1 << 28
"""Of one waveform, before and after resampling: 4.6 hours at 16 kHz, 1 GB."""
_LOUDEST = 2.0**31
"""Beyond the range of any integer format, so that numbers are not sound."""


class BadSample(Exception):
    """One sample that cannot be used; the message is the reason a person reads."""


def decode(raw: bytes | str, modality: Modality, sampling_rate: int | None = None) -> Value:
    """Decode one sample.

    Args:
        raw: The bytes of a file, or text that is already a string.
        modality: What to decode it as.
        sampling_rate: Rate of the waveform in Hz; None keeps the file's own.

    Returns:
        An RGB image, a string, or a float32 waveform of shape ``(frames,)``.

    Raises:
        BadSample: The bytes are damaged, empty, or of another kind.
    """
    if modality == "text":
        return decode_text(raw) if isinstance(raw, bytes) else clean_text(raw)
    if isinstance(raw, str):
        raise BadSample(f"text where {PLURAL[modality]} should be")
    if not raw:
        raise BadSample("empty file")
    return decode_image(raw) if modality == "image" else decode_audio(raw, sampling_rate)


def decode_image(raw: bytes) -> Image.Image:
    """Decode an image file to RGB, upright, with transparency composited on white.

    Args:
        raw: The bytes of the file; of an animation, the first frame counts.

    Returns:
        A fully loaded image of mode ``RGB`` that holds no file open.

    Raises:
        BadSample: Not an image, damaged, or so large that Pillow takes it for a decompression bomb.
    """
    try:
        with warnings.catch_warnings():
            # Odd metadata is no reason to drop an image; a bomb is, before its pixels are allocated.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            known = [name for name in _FORMATS if name in _registered()]
            with Image.open(io.BytesIO(raw), formats=known) as image:
                image.load()
                return _to_rgb(ImageOps.exif_transpose(image))
    except BadSample:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadSample(f"too many pixels: {error}") from error
    except UnidentifiedImageError as error:
        raise BadSample("not an image, or of a format Pillow cannot read") from error
    except Exception as error:  # Pillow's decoders raise anything from struct.error to SyntaxError
        raise BadSample(f"damaged image: {error}") from error


@cache
def _registered() -> frozenset[str]:
    Image.init()
    return frozenset(Image.OPEN)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.mode == "F":
        raise BadSample("floating-point pixels have no fixed range; save it with 8 or 16 bits a channel")
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colour.size, "white"), colour).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255, rounded; Pillow's own conversion clips, which turns such an image white."""
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise BadSample("32-bit pixels have no fixed range; save it with 8 or 16 bits a channel")
    return Image.fromarray(((pixels + 128) // 257).astype(np.uint8)).convert("RGB")


def decode_audio(raw: bytes, sampling_rate: int | None = None) -> npt.NDArray[np.float32]:
    """Decode an audio file to one channel, the mean of its own, resampled where asked. Silence is kept.

    Args:
        raw: The bytes of the file.
        sampling_rate: Rate of the result in Hz; None keeps the file's own.

    Returns:
        float32 waveform of shape ``(frames,)``, full scale at 1.0.

    Raises:
        BadSample: Not audio, damaged, without frames, too long, or with numbers that are not sound.
    """
    soundfile, soxr = require("soundfile", "audio"), require("soxr", "audio")
    try:
        with soundfile.SoundFile(io.BytesIO(raw)) as file:
            rate = file.samplerate
            if rate not in _RATES:
                raise BadSample(f"a sampling rate of {rate} Hz; {_RATES[0]:,} to {_RATES[-1]:,} Hz are read")
            longest = file.frames * max(file.channels, (sampling_rate or rate) / rate)
            if longest > _MOST_FRAMES:
                raise BadSample(
                    f"{longest / (sampling_rate or rate) / 3600:.1f} hours of audio; cut it into shorter files"
                )
            frames = file.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        raise BadSample(f"not audio, damaged, or of a format libsndfile cannot read: {error}") from error
    waveform = frames.mean(axis=1, dtype=np.float32)
    if waveform.size and sampling_rate is not None and rate != sampling_rate:
        waveform = soxr.resample(waveform, rate, sampling_rate)
    if not waveform.size:
        raise BadSample("no audio in it: zero frames")
    loudest = np.abs(waveform).max()
    if not loudest < _LOUDEST:
        raise BadSample(f"audio with samples of {loudest:g}, where 1 is full scale")
    return np.ascontiguousarray(waveform, dtype=np.float32)


def decode_text(raw: bytes) -> str:
    """Decode a file of UTF-8; see :func:`clean_text`.

    Raises:
        BadSample: Not UTF-8, binary, or blank.
    """
    return clean_text(decode_utf8(raw))


def decode_utf8(raw: bytes) -> str:
    """Decode UTF-8, with or without a byte-order mark, and change nothing else.

    Raises:
        BadSample: Not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}") from error


def clean_text(text: str) -> str:
    """Text with line feeds for line ends and no surrounding white space.

    Raises:
        BadSample: Blank, binary, or holding half of a surrogate pair, which no tokenizer takes.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise BadSample("no text in it")
    if "\0" in text:
        raise BadSample("binary data or UTF-16, not UTF-8 text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadSample("half of a surrogate pair, not valid text") from error
    return text
