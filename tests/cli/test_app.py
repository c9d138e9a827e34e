"""What every command shares: quiet, completion, the version."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from report.samples import make_evaluation, make_report, write_artifact

import latte_convert


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_leaves_results_warnings_and_errors(latte, tmp_path: Path, place: str, flag: str) -> None:
    hybrid = write_artifact(tmp_path / "hybrid", make_report())
    foreign = make_evaluation().model_copy(update={"artifact_fingerprint": None})
    (hybrid / "eval-knn.json").write_text(foreign.model_dump_json())
    loud = latte("report", hybrid)
    silent = latte(flag, "report", hybrid) if place == "before" else latte("report", hybrid, flag)
    assert silent[:2] == loud[:2] == (0, f"{hybrid}/report.html\n{hybrid}/report.json\n")
    assert "next: latte" in loud[2]
    assert silent[2].startswith("warning: a result in")
    assert "next:" not in silent[2]
    code, _, error = latte(flag, "inspect", tmp_path / "absent")
    assert code == 3
    assert error.startswith("latte: there is no artifact at")
    assert latte("report", hybrid) == loud, "quiet is of one call"


def test_quiet_shows_neither_tables_nor_progress(capsys, monkeypatch) -> None:
    from latte_convert.cli import console

    monkeypatch.setattr(console, "_QUIET", threading.Event())
    for wish in (False, True):
        console.quiet(wish)
        console.table("A table", ("head",), [("cell",)])
        with console.progress() as progress:
            progress("A step", 1)()
        shown = capsys.readouterr().err
        assert [text in shown for text in ("A table", "cell", "A step")] == [not wish] * 3


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


def test_what_to_type_next(latte, capsys, tmp_path: Path) -> None:
    from latte_convert.cli import console

    path = write_artifact(tmp_path / "hybrid", make_report(cosine=0.99))
    console.next_step(make_report(cosine=0.99), path)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("Worth it if your task holds: 1.12 times faster")
    assert shown[1:] == [f"next: latte eval {path} --task knn --data LABELLED --out {path}/eval-knn.json"]
