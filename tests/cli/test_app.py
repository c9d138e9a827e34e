"""What every command shares: quiet, completion, the version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from report.samples import make_report, write_artifact

import latte_convert


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_leaves_results_warnings_and_errors(latte, tiny_dino, tmp_path, place: str, flag: str) -> None:
    from PIL import Image

    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(4):
        Image.new("RGB", (60, 60), (50 * i, 90, 20)).save(photos / f"{i}.png")
    command = ["score", tiny_dino, "--calib", photos, "--samples", 4, "--kernel", "latte", "-k", 2]
    loud = latte(*command)
    silent = latte(flag, *command) if place == "before" else latte(*command, flag)
    assert loud[:2] == silent[:2]
    assert "Sensitivity of 6 eligible" in loud[2]
    assert all(line.startswith("warning: ") for line in silent[2].splitlines())
    code, _, error = latte(flag, "inspect", tmp_path / "absent")
    assert code == 3
    assert error.startswith("latte: there is no artifact at")
    assert "Sensitivity" in latte(*command)[2], "quiet is of one call"


def test_version(latte) -> None:
    assert latte("--version") == (0, f"latte_convert {latte_convert.__version__}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    environment = {
        **os.environ,
        "_LATTE_COMPLETE": f"source_{shell}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    program = "import sys; sys.argv[0] = 'latte'; from latte_convert.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "_LATTE_COMPLETE" in done.stdout


def test_convert_says_what_to_type_next(latte, capsys, tmp_path: Path) -> None:
    from latte_convert.cli import console

    path = write_artifact(tmp_path / "hybrid", make_report(cosine=0.99))
    console.next_step(make_report(cosine=0.99), path)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("Worth it if your task holds: 1.12 times faster")
    assert shown[1:] == [
        f"report: {path}/report.html",
        f"next: latte eval {path} --task knn --data LABELLED --out {path}/eval-knn.json",
    ]
