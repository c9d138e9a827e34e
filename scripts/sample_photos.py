"""Write the real photographs that come inside scikit-image and scikit-learn, and crops of them, as files."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from PIL import Image

# Scans, textures, drawings and microscope pictures are left out: nobody looks at a "subject" in them.
PHOTOS = {
    "skimage": (
        "data",
        (
            "astronaut.png",
            "camera.png",
            "chelsea.png",
            "clock_motion.png",
            "coffee.png",
            "coins.png",
            "motorcycle_left.png",
            "rocket.jpg",
        ),
    ),
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
}
# name -> left, top, right, bottom as fractions: quadrants at scale 1/2, and the middle at scale 2/3
CROPS = {
    "tl": (0.0, 0.0, 0.5, 0.5),
    "tr": (0.5, 0.0, 1.0, 0.5),
    "bl": (0.0, 0.5, 0.5, 1.0),
    "br": (0.5, 0.5, 1.0, 1.0),
    "middle": (1 / 6, 1 / 6, 5 / 6, 5 / 6),
}


def photo_files() -> list[Path]:
    """The ten photographs where the two packages keep them (the packages themselves are not imported).

    Raises:
        FileNotFoundError: A package or one of its files is absent; the message names it.
    """
    files: list[Path] = []
    for package, (folder, names) in PHOTOS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"package {package} is not installed: pip install 'latte-convert[demo]'")
        files += [Path(spec.origin).parent / folder / name for name in names]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"sample photographs are missing: {', '.join(missing)}")
    return files


def write_photos(out: Path) -> list[Path]:
    """Write 10 photographs and 5 crops of each (60 files) into ``out``; files already there are kept.

    Args:
        out: Folder, made where absent. Photographs keep their file's bytes; crops are ``<stem>-<crop>.jpg``.

    Returns:
        All 60 paths, sorted by name.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for source in photo_files():
        target = out / source.name
        written.append(target)
        if not target.exists():
            scratch = target.with_suffix(target.suffix + ".part")
            shutil.copyfile(source, scratch)
            os.replace(scratch, target)
        written += _write_crops(source, out)
    return sorted(written)


def _write_crops(source: Path, out: Path) -> list[Path]:
    targets = {name: out / f"{source.stem}-{name}.jpg" for name in CROPS}
    if not all(target.exists() for target in targets.values()):
        with Image.open(source) as opened:
            image = opened.convert("RGB")
        for name, target in targets.items():
            left, top, right, bottom = CROPS[name]
            w, h = image.size
            crop = image.crop((round(left * w), round(top * h), round(right * w), round(bottom * h)))
            scratch = target.with_suffix(".jpg.part")
            crop.save(scratch, format="JPEG", quality=95)
            os.replace(scratch, target)
    return list(targets.values())


def main(argv: list[str] | None = None) -> int:
    """Command line: ``sample_photos.py --out DIR``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the photographs")
    arguments = parser.parse_args(argv)
    try:
        written = write_photos(arguments.out)
    except OSError as error:
        print(f"sample_photos: {error}", file=sys.stderr)
        return 3
    print(f"{len(written)} photographs in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
