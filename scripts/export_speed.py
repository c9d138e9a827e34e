"""Time of the exported hybrid beside the exported original and both in PyTorch, on DINOv2-S, and their peak memory.

Each variant lives in a process of its own with two threads and computes only when it is its turn, so that a machine
that slows down slows all of them. Beside the wall time stands the processor time of the process, which other work on
the machine changes less. Writes ``export.json`` and ``export.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
THREADS = 2
TITLES = {
    "original": "original, PyTorch",
    "original_plain": "original, `torch.onnx.export`",
    "original_onnx": "original, `latte export`",
    "hybrid": "hybrid, PyTorch",
    "hybrid_onnx": "hybrid, `latte export`",
    "merging": "hybrid that merges, PyTorch",
    "merging_onnx": "hybrid that merges, `latte export`",
}
RECIPES: dict[str, dict[str, Any]] = {
    "hybrid": {"ratio": 0.67},
    "merging": {"target_speedup": 2.5, "resolution": 1036, "samples": 6},
}
"""The default, near_far in two thirds of the layers; and a plan for a speed at 1036 px, which merges tokens."""


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    model = cache / "latte_convert" / "models" / "dinov2-small-saliency"
    parser.add_argument("--model", type=Path, default=model)
    parser.add_argument("--photos", type=Path, default=HERE.parent / "tests" / "data" / "photos")
    parser.add_argument("--work", type=Path, help="Folder for the hybrid and the files; kept, and used again.")
    parser.add_argument("--resolutions", default="518,1036,1554")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default=",".join(TITLES))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--worker", nargs=3, metavar=("VARIANT", "FILE", "PX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = options.work or Path(folder)
        hybrids = {
            name: make_hybrid(options.model, options.photos, folder / name, recipe)
            for name, recipe in RECIPES.items()
            if name in options.variants
        }
        rows = []
        for resolution in map(int, options.resolutions.split(",")):
            files = make_files(options.model, hybrids, folder, resolution, options.variants.split(","))
            rows += measure(files, resolution, options.rounds)
            write(options.out, rows)


def make_hybrid(model: Path, photos: Path, out: Path, recipe: dict[str, Any]) -> Path:
    """What a recipe makes of the model."""
    import latte_convert

    if not out.exists():
        made = latte_convert.convert(
            model, photos, recipe=latte_convert.Recipe(**{"samples": 4, **recipe}), progress=False
        )
        made.save(out)
        print(made, flush=True)
    return out


def make_files(
    model: Path, hybrids: dict[str, Path], folder: Path, resolution: int, variants: list[str]
) -> dict[str, Path]:
    """By variant: its directory or file, made if it is not there. The original's files take images of any size."""
    files = {"original": model, **hybrids}
    files |= {f"{name}_onnx": folder / f"{name}_{resolution}" / "model.onnx" for name in hybrids}
    files["original_onnx"] = folder / "original" / "model.onnx"
    files["original_plain"] = folder / "original_plain.onnx"
    files = {name: files[name] for name in TITLES if name in variants}
    for name, file in files.items():
        if file.exists():
            continue
        if name == "original_plain":
            export_plainly(model, file)
        else:
            hybrid = hybrids.get(name.removesuffix("_onnx"))
            source, fixed = (model, None) if hybrid is None else (hybrid, resolution)
            export(source, file.parent, fixed)
    return files


def measure(files: dict[str, Path], resolution: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each variant."""
    load = os.getloadavg()[0]
    workers = {name: Worker(name, file, resolution) for name, file in files.items()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in files}
    for _ in range(rounds):
        for name, worker in workers.items():
            taken[name].append(worker.run())
    rows = []
    for name, runs in taken.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in ("wall_s", "cpu_s")}
        row = {"resolution": resolution, "variant": name, **middle, "peak_mb": runs[-1]["peak_mb"], "rounds": rounds}
        rows.append({**row, "load_before": load, "wall_all_s": [run["wall_s"] for run in runs]})
        workers[name].end()
    return rows


def export(source: Path, out: Path, resolution: int | None) -> None:
    """As a user does it."""
    import latte_convert

    found = latte_convert.export(source, out, resolution=resolution, overwrite=True, progress=False)
    print(f"{out}: {found.worst.value:.1e} from PyTorch", flush=True)


def export_plainly(model: Path, file: Path) -> None:
    """What PyTorch's exporter makes of the library's own class."""
    import torch
    import transformers

    network = transformers.AutoModel.from_pretrained(model).eval()
    pixels = torch.randn(2, 3, 56, 70)
    batch, rows, columns = (torch.export.Dim(name, min=1, max=1024) for name in ("batch", "rows", "columns"))
    shapes = {"pixel_values": {0: batch, 2: 14 * rows, 3: 14 * columns}}
    torch.onnx.export(
        network, (), file, kwargs={"pixel_values": pixels}, dynamo=True, dynamic_shapes=shapes, opset_version=20
    )


class Worker:
    """A process with one variant, warm, that computes when it is asked."""

    def __init__(self, variant: str, file: Path, resolution: int) -> None:
        command = [sys.executable, __file__, "--worker", variant, str(file), str(resolution)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "GOMP_SPINCOUNT": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self) -> dict[str, float]:
        """Seconds of one image, and the peak memory so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


def work(variant: str, file: str, resolution: str) -> None:
    """Compute one image for each line on stdin."""
    from latte_convert.environment import peak_memory_bytes

    run = compute_onnx(Path(file), int(resolution)) if "_" in variant else compute_torch(file, int(resolution))
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak_mb": peak_memory_bytes() / 1e6}), flush=True)


def compute_onnx(file: Path, resolution: int) -> Callable[[], Any]:
    """ONNX Runtime alone."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.set_denormal_as_zero", "1")  # softmax is full of them
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).normal(size=(1, 3, resolution, resolution)).astype(np.float32)
    return lambda: session.run(None, {"pixel_values": pixels})


def compute_torch(directory: str, resolution: int) -> Callable[[], Any]:
    """The original, or what ``load`` gives."""
    import torch
    import transformers

    import latte_convert

    torch.set_num_threads(THREADS)
    hybrid = (Path(directory) / "latte.json").is_file()
    model = latte_convert.load(directory) if hybrid else transformers.AutoModel.from_pretrained(directory).eval()
    pixels = torch.randn(1, 3, resolution, resolution, generator=torch.Generator().manual_seed(0))

    def run() -> None:
        with torch.no_grad():
            model(pixels)

    return run


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """The figures as JSON, and the table."""
    (out / "export.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    lines = [
        "DINOv2-S, `near_far` in 8 of 12 layers, or the plan of `--target-speedup 2.5` at 1036 px, which merges "
        "tokens; one image, two threads: median wall time (processor time of all threads), and the peak memory of the "
        "process. ONNX Runtime takes denormal numbers for zero (`session.set_denormal_as_zero`).",
        "",
        "| | " + " | ".join(f"{size} px" for size in dict.fromkeys(row["resolution"] for row in rows)) + " |",
        "|---|" + "---|" * len({row["resolution"] for row in rows}),
    ]
    for name, title in TITLES.items():
        cells = [
            f"{row['wall_s']:.2f} s ({row['cpu_s']:.2f} s), {row['peak_mb']:.0f} MB" for row in rows
            if row["variant"] == name
        ]  # fmt: skip
        lines += [f"| {title} | {' | '.join(cells)} |"] if cells else []
    loads = ", ".join(f"{load:.1f}" for load in dict.fromkeys(row["load_before"] for row in rows))
    lines += ["", f"Load average of the machine before each size: {loads}."]
    (out / "export.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
