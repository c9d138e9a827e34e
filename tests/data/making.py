"""Samples of every kind, written for a test, and what is read back of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from latte_convert.data.samples import SampleSet, open_samples

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


def shard(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
