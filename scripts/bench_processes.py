"""Time a conversion in one process and in several, each with one thread, and compare what comes out.

    python scripts/bench_processes.py MODEL --calib DATA --samples 64 --resolution 518

Both conversions run in turns, on a machine that does nothing else; a time is the wall time of the whole command, from
its start to its end. Options that this script does not know go to ``latte convert``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file


def convert(options: argparse.Namespace, processes: int, out: Path) -> float:
    """Seconds of a conversion in some processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [
        sys.executable, *(several if processes > 1 else []), "-m", "latte_convert", "convert", options.model,
        "--calib", options.calib, *options.rest, "--out", str(out),
    ]  # fmt: skip
    start = time.monotonic()
    done = subprocess.run(
        arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return time.monotonic() - start


def content(out: Path) -> dict[str, Any]:
    """What the report says of an artifact, and its tensors."""
    report = json.loads((out / "report.json").read_text())
    return {
        "converted": report["converted"],
        "outputs": report["fidelity"]["outputs"],
        "seconds": report["cost"]["seconds"],
        "tensors": load_file(out / "model.safetensors"),
    }


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options, options.rest = parser.parse_known_args()
    times: dict[int, list[float]] = {1: [], options.processes: []}
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for processes in times:
                out = Path(folder) / f"{processes}-{number}"
                times[processes].append(convert(options, processes, out))
                found[processes] = content(out)
                print(f"{processes} processes: {times[processes][-1]:.1f} s", file=sys.stderr, flush=True)
    one, several = found[1], found[options.processes]
    differences = [
        (one["tensors"][key].float() - several["tensors"][key].float()).abs().max() for key in one["tensors"]
    ]
    result = {
        "command": ["convert", options.model, "--calib", options.calib, *options.rest],
        "processes": options.processes,
        "seconds": {str(processes): [round(each, 1) for each in seconds] for processes, seconds in times.items()},
        "times as fast": round(min(times[1]) / min(times[options.processes]), 2),
        "stages": {"1": one["seconds"], str(options.processes): several["seconds"]},
        "same plan": one["converted"] == several["converted"],
        "same held-out figures": one["outputs"] == several["outputs"],
        "largest difference of a tensor": float(max(differences)),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
