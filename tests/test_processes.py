"""Two and three processes give what one gives; what goes wrong in one ends all, with one message."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

Ended = tuple[int, str, str]
"""Exit code, stdout, stderr."""


def start(
    count: int, *arguments: object, program: str = "latte_convert", port: int | None = None, **environment: str
) -> list[subprocess.Popen]:
    """Start a command in some processes, as torchrun does, on a port that is free."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    together = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if count > 1 else {}
    command = [sys.executable, "-m", program, *map(str, arguments)]
    return [
        subprocess.Popen(
            command, env={**os.environ, **together, **environment, **({"RANK": str(rank)} if count > 1 else {})},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen]) -> list[Ended]:
    outputs = [process.communicate(timeout=240) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run(count: int, *arguments: object, **environment: str) -> Ended:
    """What the first of some processes ends with; the others end with the same code, and say nothing."""
    first, *others = ended(start(count, *arguments, **environment))
    assert all((code, stdout) == (first[0], "") for code, stdout, _ in others), first[2]
    assert not [stderr for *_, stderr in others if "latte: " in stderr]
    return first


def said(stderr: str) -> list[str]:
    """What latte says of a failure."""
    return [line for line in stderr.splitlines() if line.startswith("latte: ")]


def figures(directory: Path) -> dict:
    """What a report says but for the day, the times and the memory."""
    report = json.loads((directory / "report.json").read_text())
    for name in ("created", "warnings", "artifact_fingerprint", "attention"):
        del report[name]
    for name in ("forward_ms", "seconds", "peak_memory_bytes"):
        del report["cost"][name]
    return report


def conversion(model: Path, data: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("convert", model, "--calib", data, "--samples", 9, "--kernel", "latte", "--out", out, *more)


@pytest.fixture(scope="module")
def alone(tiny_dino: Path, photos: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "hybrid"
    code, _, err = run(1, *conversion(tiny_dino, photos, out, "--scorer", "greedy"))
    assert code == 0, err
    return out


def check_same(out: Path, alone: Path) -> None:
    assert figures(out) == figures(alone)
    ours, theirs = (load_file(place / "model.safetensors") for place in (out, alone))
    assert ours.keys() == theirs.keys()
    assert all((ours[key] - theirs[key]).abs().max() <= 1e-6 for key in ours)


def test_torchrun_with_two_processes_gives_what_one_gives(alone, tiny_dino, photos, tmp_path):
    out = tmp_path / "hybrid"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = map(str, conversion(tiny_dino, photos, out, "--scorer", "greedy"))
    done = subprocess.run(
        [*torchrun, "-m", "latte_convert", *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert done.stderr.count("report: ") == 1
    check_same(out, alone)


def test_three_processes_take_up_the_work_of_one_that_was_killed(alone, tiny_dino, photos, tmp_path):
    out, work = tmp_path / "hybrid", tmp_path / "work"
    command = conversion(tiny_dino, photos, out, "--scorer", "greedy", "--work", work)
    (process,) = start(1, *command)
    while process.poll() is None and len(list(work.glob("fits/*.safetensors"))) < 3:
        pass
    process.kill()
    process.communicate()
    fits = {path: path.stat().st_mtime_ns for path in work.glob("fits/*.safetensors")}
    code, stdout, stderr = run(3, *command)
    assert (code, stdout) == (0, f"{out}\n"), stderr
    assert len(fits) >= 3
    assert all(path.stat().st_mtime_ns == before for path, before in fits.items())
    check_same(out, alone)


def test_two_processes_evaluate_and_score_as_one(alone, tiny_dino, photos, tmp_path):
    for name, command in (
        ("eval.json", ("eval", alone, "--task", "fidelity", "--data", photos, "--samples", 7, "--batch-size", 2)),
        ("score.json", ("score", tiny_dino, "--calib", photos, "--samples", 6, "--kernel", "latte")),
    ):
        found = []
        for count in (1, 2):
            out = tmp_path / f"{count}-{name}"
            code, stdout, stderr = run(count, *command, "--out", out)
            assert code == 0, stderr
            report = json.loads(out.read_text())
            for key in ("created", "seconds", "cost", "attention"):
                report.pop(key, None)
            found.append((stdout, report))
        assert found[0] == found[1]


FAILING = """
import os, sys
from latte_convert import conversion, processes
from latte_convert.errors import DataError
from latte_convert.__main__ import main
real, how = conversion.measure, os.environ["HOW"]

def failing(*arguments, **options):
    if os.environ["RANK"] == "1":
        if how == "error":
            raise DataError("its disk is gone.")
        os.kill(os.getpid(), {"lost": 9, "hangs": 19}[how])
    return real(*arguments, **options)

if os.environ["RANK"] == "1" and how == "versions":
    versions = processes.library_versions()
    processes.library_versions = lambda: {**versions, "torch": "1.0"}
elif os.environ["RANK"] == "1" and how == "data":
    sys.argv[sys.argv.index("--calib") + 1] = os.environ["OTHER"]
else:
    conversion.measure = failing
main()
"""


@pytest.mark.parametrize(
    ("how", "sentence", "code"),
    [
        ("error", "latte: its disk is gone.", 3),
        ("versions", "latte: process 1 has another version of torch than process 0 (1.0, not ", 3),
        ("data", "latte: process 1 has another choice of samples than process 0. Give all of them the same", 3),
        ("lost", "latte: another process was lost, or has not answered in time", 1),
        ("hangs", "latte: another process was lost, or has not answered in time", 1),
    ],
)
def test_a_failure_of_one_ends_all(tiny_dino, photos, tmp_path, how, sentence, code):
    (tmp_path / "failing.py").write_text(FAILING)
    other = tmp_path / "photos"
    other.mkdir()
    for path in sorted(photos.iterdir())[:10]:
        (other / path.name).write_bytes(path.read_bytes())
    out = tmp_path / "out"
    started = start(
        2, *conversion(tiny_dino, photos, out), program="failing", HOW=how, OTHER=str(other), LATTE_PATIENCE="15",
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )  # fmt: skip
    stdout, stderr = started[0].communicate(timeout=240)
    if how == "hangs":
        started[1].kill()
    _, other_said = started[1].communicate(timeout=60)
    assert (started[0].returncode, stdout) == (code, "")
    assert [line[: len(sentence)] for line in said(stderr)] == [sentence]
    assert said(other_said) == []
    assert how in ("lost", "hangs") or started[1].returncode == code
    assert not out.exists()


BUILDER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x

def seeded():
    torch.manual_seed(0)
    return Net()

def drawn():
    torch.seed()
    return Net()
"""


def test_a_model_that_each_process_builds(tmp_path):
    """It is converted as by one process where all build the same, and refused where they do not."""
    (tmp_path / "builder.py").write_text(BUILDER)
    batches, fewer = tmp_path / "batches", tmp_path / "fewer"
    batches.mkdir()
    for number in range(6):
        save_file({"x": torch.randn(1, 40, 16)}, batches / f"{number}.safetensors")
    shutil.copytree(batches, fewer)
    (fewer / "5.safetensors").unlink()
    path = os.pathsep.join([str(tmp_path), *sys.path])

    def command(factory: str, data: Path, out: str) -> tuple[object, ...]:
        return (
            "convert", "--model-factory", f"builder:{factory}", "--calib", data, "--kernel", "latte", "--out",
            tmp_path / out,
        )  # fmt: skip

    for count in (1, 2):
        code, _, stderr = run(count, *command("seeded", batches, str(count)), PYTHONPATH=path)
        assert code == 0, stderr
    check_same(tmp_path / "2", tmp_path / "1")
    code, _, stderr = run(2, *command("drawn", batches, "drawn"), PYTHONPATH=path)
    assert (code, said(stderr)) == (3, [f"{OTHER.format('model')} and seed what a model factory draws."])
    (tmp_path / "failing.py").write_text(FAILING)
    started = start(
        2, *command("seeded", batches, "other"), program="failing", HOW="data", OTHER=str(fewer), PYTHONPATH=path
    )
    (code, _, stderr), (other, *_) = ended(started)
    assert (code, other) == (3, 3)
    assert said(stderr) == [f"{OTHER.format('choice of samples')} and seed what a model factory draws."]
    assert {each.name for each in tmp_path.iterdir()} == {"1", "2", "batches", "fewer", "builder.py", "failing.py"}


OTHER = "latte: process 1 has another {} than process 0. Give all of them the same command and files,"


def test_a_port_in_use(tiny_dino, photos, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first, other = start(2, *conversion(tiny_dino, photos, tmp_path / "out"), port=port, LATTE_PATIENCE="20")
        _, stderr = first.communicate(timeout=120)
        other.kill()  # as torchrun does
        other.communicate()
    assert first.returncode == 3
    (sentence,) = said(stderr)
    assert sentence.startswith("latte: the processes cannot be joined: ")
    assert sentence.endswith("Start all of them with torchrun, on a free port.")


def test_an_interrupt_ends_all_with_one_message(tiny_dino, photos, tmp_path):
    started = start(2, *conversion(tiny_dino, photos, tmp_path / "out", "--work", tmp_path / "work"))
    while not list((tmp_path / "work").glob("fits/*.safetensors")):
        assert started[0].poll() is None
    for process in started:
        process.send_signal(signal.SIGINT)
    (code, stdout, stderr), (other, *_) = ended(started)
    assert (code, other, stdout) == (130, 130, "")
    assert said(stderr) == ["latte: interrupted."]
    assert not (tmp_path / "out").exists()


def test_a_command_that_is_not_shared_says_so(alone):
    code, stdout, stderr = run(2, "verify", alone)
    assert (code, stdout) == (2, "")
    assert said(stderr) == ["latte: several processes share convert, score, eval; start this command without torchrun."]
