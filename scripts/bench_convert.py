"""Time and memory of a conversion, each in a fresh process.

    python scripts/bench_convert.py --model DIR --photos DIR [--samples 32] [--growth-resolution 224] [--json FILE]

First one conversion at the model's own resolution: wall time, stages, peak memory. Then, at a smaller resolution so
that it takes minutes and not an hour, one with as many samples and one with ten times as many: how much the peak grows.
Photos are used over and over under new names (with one pixel changed, as equal files count once) where there are
fewer than samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image


def main() -> None:
    """Run both conversions and print the growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--photos", type=Path, required=True, help="folder of images")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--factor", type=int, default=10, help="the second run uses this many times the samples")
    parser.add_argument("--growth-resolution", type=int, default=224, help="image size of the two runs that compare")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos = spread(arguments.photos, arguments.samples * arguments.factor, Path(folder) / "photos")
        few, many = arguments.samples, arguments.samples * arguments.factor
        own = measure(arguments.model, photos, few, Path(folder) / "own")
        size = arguments.growth_resolution
        runs = [measure(arguments.model, photos, n, Path(folder) / str(n), resolution=size) for n in (few, many)]
    growth = runs[1]["peak_mib"] / runs[0]["peak_mib"] - 1
    print(f"peak memory grows by {growth:+.1%} from {few} to {many} samples at {size} px")
    if arguments.json:
        arguments.json.write_text(json.dumps({"own": own, "growth": {"runs": runs, "peak": growth}}, indent=2) + "\n")


def spread(source: Path, count: int, target: Path) -> Path:
    """Fill ``target`` with ``count`` distinct images made from those in ``source``."""
    target.mkdir(parents=True)
    photos = sorted(p for p in source.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    for i in range(count):
        with Image.open(photos[i % len(photos)]) as image:
            copy = image.convert("RGB")
        copy.putpixel((0, 0), (i // 65536 % 256, i // 256 % 256, i % 256))
        copy.save(target / f"{i:05d}.png")
    return target


def measure(model: Path, photos: Path, samples: int, out: Path, resolution: int | None = None) -> dict[str, Any]:
    """One conversion by the command line, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "latte_convert",
        "convert",
        str(model),
        "--calib",
        str(photos),
        "--samples",
        str(samples),
        "--out",
        str(out),
        "--json",
    ]
    command += ["--resolution", str(resolution)] if resolution else []
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.stderr)
    report = json.loads(done.stdout)
    cost = report["cost"]
    run = {
        "samples": samples,
        "wall_s": round(wall, 1),
        "peak_mib": round(cost["peak_memory_bytes"] / 2**20),
        "threads": cost["threads"],
        "seconds": {stage: round(seconds, 1) for stage, seconds in cost["seconds"].items()},
        "fidelity": report["fidelity"]["outputs"][report["fidelity"]["primary"]]["cosine"],
        "converted": report["converted"],
    }
    print(f"{samples} samples, {resolution or 'own'} px: {wall:.0f} s, peak {run['peak_mib']} MiB, {run['seconds']}")
    return run


if __name__ == "__main__":
    main()
