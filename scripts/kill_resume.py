"""Kill conversions that keep their work at random moments, take them up again, and compare what comes out.

    python scripts/kill_resume.py MODEL --calib DATA --kills 50

Every round starts anew with an empty work directory, is killed once (SIGKILL) at a random moment after a random number
of finished pieces, and is then run to its end. What is checked: the artifact of the second run
equals that of a run that was never interrupted, bit for bit (weights and manifest); every piece that the killed run had
finished is used and not made again, so that at most the one under way is lost, which is one site's fit or one sample's
trials; and nothing half-written is left. Exit code 1 where a round fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP = 0.01
"""Seconds between two looks at a run."""


def command(options: argparse.Namespace, out: Path, work: Path | None) -> list[str]:
    """A conversion."""
    kept = ["--work", str(work)] if work else []
    return [
        sys.executable, "-m", "latte_convert", "convert", options.model, "--calib", options.calib, *options.rest,
        "--out", str(out), *kept,
    ]  # fmt: skip


def run(arguments: list[str]) -> None:
    """Run to the end."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a conversion ended with {done.returncode}: {done.stderr[-2000:]}")


def content(out: Path) -> dict[str, Any]:
    """What of an artifact must be the same: weights and configuration to the byte, the manifest but for results."""
    manifest = json.loads((out / "latte.json").read_text())
    manifest.pop("results")
    files = {name: (out / name).read_bytes() for name in manifest["files"]}
    return {"manifest": manifest, **files}


def pieces(work: Path) -> dict[str, tuple[int, bytes]]:
    """Every finished piece, by name: when it was written, and what it is."""
    found = sorted(work.glob("*/*.safetensors"))
    return {path.relative_to(work).as_posix(): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def killed(arguments: list[str], work: Path, after: int, more: float) -> bool:
    """Start a run and kill it some seconds after it has finished some pieces; whether it was still running."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and len(list(work.glob("*/*.safetensors"))) < after:
        time.sleep(STEP)
    time.sleep(more)
    if process.poll() is not None:
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def attempt(
    options: argparse.Namespace, folder: Path, after: int, more: float, whole: dict[str, Any]
) -> dict[str, Any]:
    """One kill and what came of it."""
    work, out = folder / "work", folder / "out"
    was_killed = killed(command(options, out, work), work, after, more)
    finished = pieces(work)
    if was_killed and out.exists():
        shutil.rmtree(out)
    if not out.exists():
        run(command(options, out, work))
    every, faults = pieces(work), []
    if any(every.get(name) != piece for name, piece in finished.items()):
        faults.append("a finished piece was made again, or changed")
    if content(out) != whole:
        faults.append("the artifact is another")
    if left := [path.name for path in work.rglob("*.tmp")]:
        faults.append(f"{len(left)} files were left behind")
    moment = f"{more:.2f} s after {after} pieces"
    return {"moment": moment, "killed": was_killed, "found": len(finished), "of": len(every), "faults": faults}


def main() -> None:
    """Run all rounds and print a line for each, then one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write what came of every kill")
    options, options.rest = parser.parse_known_args()
    chance = random.Random(options.seed)  # noqa: S311 (moments of kills, no secrets)
    rounds = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run(command(options, folder / "plain", None))
        start = time.monotonic()
        run(command(options, folder / "whole", folder / "whole-work"))
        seconds = time.monotonic() - start
        expected, total = content(folder / "plain"), len(pieces(folder / "whole-work"))
        if content(folder / "whole") != expected:
            raise SystemExit("keeping work changes the artifact")
        for number in range(options.kills):
            home = folder / str(number)
            home.mkdir()
            after, more = chance.randrange(total), chance.uniform(0, 2 * seconds / total)
            rounds.append(attempt(options, home, after, more, expected))
            shutil.rmtree(home)
            print(json.dumps(rounds[-1]), flush=True)
    faults = sum(bool(each["faults"]) for each in rounds)
    hits = sum(each["killed"] for each in rounds)
    taken_up = sum(each["killed"] and 0 < each["found"] < each["of"] for each in rounds)
    summary = {"kills": hits, "with some of the work done": taken_up, "faults": faults, "seconds": round(seconds, 1)}
    print(json.dumps(summary))
    if options.json:
        options.json.write_text(json.dumps({"total": summary, "rounds": rounds}, indent=2) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
