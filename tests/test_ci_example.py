"""The steps of the GitHub Actions example do what they say, run by the shell as the runner would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import latte_convert
from latte_convert.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]


def steps() -> dict[str, str]:
    """Commands of the example by the name of their step, without the installation."""
    workflow: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "github-actions.yml").read_text())
    commands = {s["name"]: s["run"] for s in workflow["jobs"]["compress"]["steps"] if "run" in s}
    assert commands.pop("Install") == 'pip install "latte-convert[eval]"'
    return commands


def run(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_step_works_and_a_second_run_compares(tmp_path: Path, photos: Path) -> None:
    model = str(ROOT / "tests" / "models" / "tiny-detr")
    environment = {"MODEL": model, "CALIB": str(photos), "TASK": "fidelity", "DATA": str(photos)}
    for name, command in steps().items():
        done = run(command, tmp_path, **environment)
        assert done.returncode == 0, f"{name}: {done.stderr}"
    assert (tmp_path / "hybrid" / "eval-fidelity.json").is_file()
    assert "fidelity" in (tmp_path / "hybrid" / "report.html").read_text()
    again = run(steps()["Compare"], tmp_path, **environment)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "diff.json").read_text())["ok"] is True
    worse = Recipe(kernel="latte", samples=4, ratio=1.0)
    latte_convert.convert(model, photos, recipe=worse).save(tmp_path / "hybrid", overwrite=True)
    assert run(steps()["Compare"], tmp_path, **environment).returncode == 4
    assert json.loads((tmp_path / "diff.json").read_text())["ok"] is False


@pytest.mark.parametrize("target", ["compress"])
def test_the_make_recipe_runs_the_same_commands(target: str) -> None:
    dry = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", target, "MODEL=m", "CALIB=c", "TASK=knn", "DATA=d"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for command in ("convert", "verify", "eval", "report"):
        assert f"bin/latte {command} " in dry
    assert "--fail-under 0.95" in dry
    assert "--min-fidelity 0.98" in dry
