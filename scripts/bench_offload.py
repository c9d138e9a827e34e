"""Convert a random ViT that is larger than the memory it may use, and measure what it used.

    python scripts/bench_offload.py --photos DIR --offload DIR [--json FILE]

The checkpoint is written shard by shard, block by block: it is never in memory as a whole. ``latte convert --offload``
then runs in a process of its own whose data (``RLIMIT_DATA``: the heap and all memory that is mapped for writing) may
not pass the limit; the system refuses what does. ``RLIMIT_AS`` would count PyTorch's own libraries, which map more than
3 GB before anything runs. The largest resident memory is read from the system's own count of the process (VmHWM).
Options that this script does not know go to ``latte convert``. ``--whole`` also tries the same conversion without
``--offload`` under the same limit, which must fail.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

BLOCK = "layers.{}."


def write_checkpoint(path: Path, width: int, layers: int, pixels: int) -> None:
    """A random ViT, a shard for each block and one for the rest, with its image processor."""
    config = transformers.ViTConfig(
        hidden_size=width, num_hidden_layers=1, num_attention_heads=width // 64, intermediate_size=4 * width,
        image_size=pixels, patch_size=14,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTModel(config)
    state = model.state_dict()
    own = {key: tensor for key, tensor in state.items() if BLOCK.format(0) in key}
    rest = {key: tensor for key, tensor in state.items() if key not in own}
    index: dict[str, str] = {}

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, path / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    path.mkdir()
    write("model-rest.safetensors", rest)
    for number in range(layers):
        block = {}
        for key, tensor in own.items():
            drawn = torch.randn_like(tensor) * (1.2 / width**0.5) if tensor.dim() == 2 else tensor.clone()
            block[key.replace(BLOCK.format(0), BLOCK.format(number))] = drawn
        write(f"model-{number:03d}.safetensors", block)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.num_hidden_layers, config.architectures = layers, ["ViTModel"]
    config.save_pretrained(path)
    transformers.ViTImageProcessor(size={"height": pixels, "width": pixels}).save_pretrained(path)


def peak_mib(pid: int) -> int:
    """The largest resident memory of a process so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)


def limited(arguments: list[str], limit: int) -> dict[str, Any]:
    """Run a command whose data may not pass a limit, in bytes."""
    start = time.monotonic()
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )  # fmt: skip
    peaks = [0]

    def watch() -> None:
        while process.poll() is None:
            peaks.append(peak_mib(process.pid))
            time.sleep(0.05)

    watching = threading.Thread(target=watch)
    watching.start()
    stdout, stderr = process.communicate()
    watching.join()
    said = [line for line in stderr.splitlines() if line.startswith("latte: ")]
    return {
        "exit code": process.returncode,
        "peak resident MiB": max(peaks),
        "seconds": round(time.monotonic() - start),
        "report": json.loads(stdout) if stdout else None,
        "said": said,
    }


def main() -> None:
    """Write, convert, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder of images")
    parser.add_argument("--offload", type=Path, required=True, help="directory with room for the model, twice")
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--pixels", type=int, default=112)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--limit", type=float, default=3.0, help="gigabytes of data")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", type=Path)
    options, options.rest = parser.parse_known_args()
    options.offload.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.offload) as folder:
        model, out = Path(folder) / "model", Path(folder) / "hybrid"
        write_checkpoint(model, options.width, options.layers, options.pixels)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        command = [
            sys.executable, "-m", "latte_convert", "convert", str(model), "--calib", str(options.photos),
            "--samples", str(options.samples), "--json", *options.rest,
        ]  # fmt: skip
        limit = int(options.limit * 1e9)
        offload = ["--offload", str(options.offload / "more"), "--out", str(out)]
        runs = {"with --offload": limited([*command, *offload], limit)}
        if options.whole:
            runs["without"] = limited([*command, "--out", str(Path(folder) / "whole")], limit)
        written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    result: dict[str, Any] = {
        "model": f"ViT of {options.layers} blocks of width {options.width}, {options.pixels} px, float32, random",
        "bytes of weights": size,
        "bytes written": written,
        "bytes of a block": size // options.layers,
        "limit of data (RLIMIT_DATA)": limit,
        "samples": options.samples,
        "options": options.rest,
    }
    for name, run in runs.items():
        report = run.pop("report")
        result[name] = run
        if report is not None:
            run["converted"] = f"{len(report['converted'])} of {len(report['sites'])} sites"
            run["held-out cosine"] = report["fidelity"]["outputs"]["last_hidden_state"]["cosine"]
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
