"""The worked example of many conversions, on a cluster that is this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_table_is_converted_and_reported(tiny_dino: Path, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    table, out = tmp_path / "table.csv", tmp_path / "hybrids"
    for name, kernel in (("one", "latte"), ("two", "elu")):
        (tmp_path / f"{name}.yaml").write_text(f"kernel: {kernel}\nsamples: 4\nk: 2\n")
    table.write_text(f"name,model,calib\ndino,{tiny_dino},{photos}\ngone,{tmp_path / 'nothing'},{photos}\n")
    recipes = [each for name in ("one", "two") for each in ("--recipe", str(tmp_path / f"{name}.yaml"))]

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / "convert_many.py"), str(table), *recipes, "--out", str(out)]
        return subprocess.run(
            [*command, "--at-once", "2"], capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    done = run()
    assert done.returncode == 1, done.stderr
    assert (
        f"gone-one: latte_convert.errors.CheckpointError: there is no model at '{tmp_path / 'nothing'}'" in done.stderr
    )
    assert {path.name for path in out.iterdir()} == {"dino-one", "dino-two", "jobs", "work", "report.html"}
    page = (out / "report.html").read_text()
    assert "dino-one" in page
    assert "dino-two" in page
    table.write_text(f"name,model,calib\ndino,{tiny_dino},{photos}\n")
    before = (out / "dino-one" / "latte.json").stat().st_mtime_ns
    again = run()
    assert (again.returncode, again.stdout) == (0, f"{out / 'report.html'}\n"), again.stderr
    assert (out / "dino-one" / "latte.json").stat().st_mtime_ns == before
