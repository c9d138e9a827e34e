"""A few kills at random moments; scripts/kill_resume.py makes many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_runs_are_taken_up(tiny_dino: Path, photos: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "kill_resume.py"), str(tiny_dino), "--calib", str(photos),
            "--kernel", "latte", "--samples", "15", "--kills", "2", "--json", str(tmp_path / "kills.json"),
        ],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills.json").read_text())
    assert found["total"]["kills"] > 0
    assert found["total"]["faults"] == 0
    assert all(each["found"] <= each["of"] for each in found["rounds"])
