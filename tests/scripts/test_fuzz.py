"""scripts/fuzz.py: it sees what a command may never do, and a slice of it runs here."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import fuzz  # noqa: E402
from fuzzing import watching  # noqa: E402
from fuzzing.cases import Case, run  # noqa: E402
from fuzzing.watching import Run  # noqa: E402

pytestmark = pytest.mark.slow


def socket() -> None:
    import socket

    with socket.socket() as opened:
        opened.connect_ex(("127.0.0.1", 9))


def program() -> None:
    subprocess.run(["true"], check=False)


def outside() -> None:
    Path("../../outside").write_text("")


def crash() -> None:
    raise KeyError("unexpected")


def leave() -> None:
    Path(".out.tmp-12345678").touch()


def run_code() -> None:
    Path("code-has-run").touch()


def page() -> None:
    Path("report.html").write_text(f"<p>{fuzz.damage.PAYLOAD}</p>")


def hang() -> None:
    while True:
        time.sleep(0)


def unspoken() -> None:
    sys.exit(3)


def half_done() -> None:
    from latte_convert.errors import InputError

    Path("out").mkdir()
    raise InputError("no.")


@pytest.fixture
def faults_of(monkeypatch, tmp_path) -> Callable[[Callable[[], None], Run], list[str]]:
    """What is seen of a command that does something."""
    place = tmp_path / "case"
    (place / "work").mkdir(parents=True)

    def watch(act: Callable[[], None], command: Run) -> list[str]:
        monkeypatch.setattr("latte_convert.artifact.verify.verify", lambda *_, **__: act())
        attack = fuzz.Attack(0, Case("test", "", [command]), place)
        until = time.monotonic() + 60
        while not attack.step():
            assert time.monotonic() < until
            time.sleep(0.01)
        return attack.faults

    return watch


@pytest.mark.parametrize(
    ("act", "seen"),
    [
        (socket, "socket.connect"),
        (program, "subprocess.Popen"),
        (outside, "/outside'"),
        (crash, "exit code 1: latte: internal error: KeyError"),
        (leave, "left behind: .out.tmp-12345678"),
        (run_code, "code of the input has run"),
        (page, "report.html holds the payload as it is"),
        (hang, "it hangs"),
        (unspoken, "exit code 3 without a sentence"),
        (half_done, "out is there although the command failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_command_may_never_do_is_seen(faults_of, monkeypatch, tmp_path, act, seen):
    monkeypatch.setattr(watching, "SECONDS", 5 if act is hang else 60)
    faults = faults_of(act, run("verify", ".", absent=tmp_path / "case" / "work" / "out"))
    assert any(seen in fault for fault in faults), faults


def test_a_sentence_is_no_fault(faults_of):
    def refuse() -> None:
        from latte_convert.errors import IntegrityError

        raise IntegrityError("it was changed.")

    assert faults_of(refuse, run("verify", ".")) == []


def test_a_case_follows_from_the_seed_and_its_number(tmp_path):
    from random import Random

    from fuzzing import damage

    for number in range(50):
        first, again = (damage.change_json({"a": [1, {"b": None}], "c": "x"}, Random(f"0:{number}")) for _ in range(2))
        assert first == again


def test_a_change_of_what_must_stay_is_seen(monkeypatch, tmp_path):
    work = tmp_path / "case" / "work"
    work.mkdir(parents=True)
    (work.parent / "tmp").mkdir()
    (work / "mine").write_text("precious")
    attack = fuzz.Attack(0, Case("test", "", [run("verify", ".")], keep={work / "mine": b"precious"}), work.parent)
    outcome = watching.Outcome(5, "", "latte: no.", [])
    assert list(fuzz.faults(attack.case.runs[0], outcome, attack)) == []
    (work / "mine").write_text("gone")
    assert list(fuzz.faults(attack.case.runs[0], outcome, attack)) == ["mine is not what it was"]


def test_the_outcome_is_counted_and_written(tmp_path):
    ended = [fuzz.Attack(i, Case(kind, "", []), tmp_path, codes=codes, faults=["it hangs"] * (i == 2))
             for i, (kind, codes) in enumerate([("kill", [-9, 0]), ("data", [3]), ("data", [1])])]  # fmt: skip
    counted = fuzz.counts(ended)
    assert list(counted) == ["kill", "data", "all"]
    assert dict(zip(fuzz.COLUMNS, counted["all"], strict=True)) == {
        **dict.fromkeys(fuzz.COLUMNS, 0), "cases": 3, "runs": 4, "exit 0": 1, "exit 3": 1, "killed": 1, "faults": 1,
    }  # fmt: skip
    page = fuzz.render(ended, argparse.Namespace(seed=7, count=3, jobs=1, limit=None), 90)
    assert "`python scripts/fuzz.py --seed 7 --count 3 --jobs 1`: 3 cases in 1.5 minutes" in page
    assert "| all | 3 | 4 | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 1 |" in page


def test_a_slice_of_the_attacks():
    command = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), "--count", "60", "--seed", "7", "--limit", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counted = re.search(r"^all +(\d+)", done.stdout, re.MULTILINE)
    assert counted
    assert int(counted[1]) > 0
