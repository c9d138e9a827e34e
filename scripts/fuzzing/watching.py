"""Run a command in a fork of this process, or as a process of its own, under limits, and see what it does.

A fork needs no second import of PyTorch, which makes two thousand runs affordable. Its audit hook sees every socket,
every program that is started, and every file that is written; what it sees is told through a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MEMORY = 3 << 30
"""Bytes that a command may take on top of what its libraries map."""
SECONDS = 60
"""CPU seconds until a command counts as hanging; on a busy machine wall time says little."""
ROOT = Path(__file__).resolve().parents[2]

_PROGRAMS = ("os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.spawn", "subprocess.Popen")
_CACHES = ("__pycache__", "torchinductor_")
"""Folders that Python and PyTorch make at their import."""
_CHANGES = ("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate")


@dataclass(frozen=True)
class Run:
    """A command to watch.

    Attributes:
        arguments: Behind ``latte``.
        codes: Exit codes that are right.
        absent: What must not be there afterwards, unless the command succeeds.
        kill: A signal and the seconds after which it is sent.
        real: As a process of its own, started as a user does.
        file_bytes: Largest file it may write: the disk is full there.
        clean: Whether nothing temporary may be there afterwards.
        meanwhile: What happens to its files, and the seconds after which it does.
        variables: Of its environment; None removes one.
        closed: Streams that are not open: 0, 1, 2.
    """

    arguments: tuple[str, ...]
    codes: tuple[int, ...] = (0, 3, 4, 5)
    absent: Path | None = None
    kill: tuple[signal.Signals, float] | None = None
    real: bool = False
    file_bytes: int | None = None
    clean: bool = True
    meanwhile: tuple[Callable[[], object], float] | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    closed: tuple[int, ...] = ()


@dataclass
class Outcome:
    """What a command did.

    Attributes:
        code: Its exit code; negative for a signal.
        stdout: What it printed.
        stderr: What it said.
        seen: Sockets, programs and changes outside its own folder.
        hung: Whether it ran out of time.
        killed: Whether the signal was sent before it ended.
    """

    code: int
    stdout: str
    stderr: str
    seen: list[str]
    hung: bool = False
    killed: bool = False


@dataclass
class Watched:
    """A command that runs: its process, and the pipes through which it speaks."""

    run: Run
    place: Path
    pid: int
    pipes: tuple[int, int, int]
    said: list[bytes] = field(default_factory=lambda: [b"", b"", b""])
    started: float = field(default_factory=time.monotonic)
    killed: bool = False
    hung: bool = False
    changed: bool = False

    def poll(self) -> Outcome | None:
        """What it did, once it has ended; sends the signals that are due."""
        ended, status, usage = os.wait4(self.pid, os.WNOHANG)
        self._listen()
        passed = time.monotonic() - self.started
        if not ended:
            if self.run.kill and not self.killed and passed >= self.run.kill[1]:
                os.kill(self.pid, self.run.kill[0])
                self.killed = True
            if self.run.meanwhile and not self.changed and passed >= self.run.meanwhile[1]:
                self.changed = True
                with contextlib.suppress(FileNotFoundError):  # the command has done it itself
                    self.run.meanwhile[0]()
            if passed > 10 * SECONDS:
                os.kill(self.pid, signal.SIGKILL)
                self.hung = True
            return None
        code = os.waitstatus_to_exitcode(status)
        for pipe in self.pipes:
            os.close(pipe)
        said = [each.decode(errors="replace") for each in self.said]
        hung = self.hung or code == -signal.SIGXCPU or usage.ru_utime + usage.ru_stime > SECONDS
        return Outcome(code, said[0], said[1], sorted(set(said[2].splitlines())), hung, self.killed)

    def _listen(self) -> None:
        """Take what is in the pipes."""
        for i, pipe in enumerate(self.pipes):
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(pipe, 1 << 20):
                    self.said[i] += piece


def start(run: Run, place: Path) -> Watched:
    """Start a command in the folder ``work`` of ``place``."""
    (place / "tmp").mkdir(exist_ok=True)
    pairs = [os.pipe() for _ in range(3)]
    (out, err, seen), writing = (tuple(pair[i] for pair in pairs) for i in (0, 1))
    for pipe in (out, err, seen):
        os.set_blocking(pipe, False)
    pid = _process(run, place, writing) if run.real else _fork(run, place, writing)
    for pipe in writing:
        os.close(pipe)
    return Watched(run, place, pid, (out, err, seen))


def _process(run: Run, place: Path, pipes: tuple[int, ...]) -> int:
    """The command as a user starts it; the hook is put in front of it."""
    code = "import sys; from fuzzing.watching import attend; attend(sys.argv[1], int(sys.argv[2]), sys.argv[3:])"
    process = subprocess.Popen(  # waited for by its number
        [sys.executable, "-c", code, str(place), str(pipes[2]), *run.arguments],
        cwd=place / "work",
        stdin=subprocess.DEVNULL,
        stdout=pipes[0],
        stderr=pipes[1],
        pass_fds=[pipes[2]],
        env=_environment(run, place, PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))),
        preexec_fn=lambda: _prepare(run),
    )
    process.returncode = 0
    return process.pid


def _environment(run: Run, place: Path, **more: str) -> dict[str, str]:
    """The variables of a command."""
    variables: dict[str, str | None] = {**os.environ, "TMPDIR": str(place / "tmp"), **more, **run.variables}
    return {name: value for name, value in variables.items() if value is not None}


def _prepare(run: Run) -> None:
    """In the new process, before it becomes the command."""
    _limit(run, 24 << 30)
    for number in run.closed:
        os.close(number)


def attend(place: str, told: int, arguments: list[str]) -> None:
    """Run the command line in this process, seen by the hook, which tells through a pipe."""
    _hook(Path(place), told)
    sys.argv = ["latte", *arguments]
    runpy.run_module("latte_convert", run_name="__main__")


def _fork(run: Run, place: Path, pipes: tuple[int, ...]) -> int:
    """The command in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _child(run, place, pipes)
        finally:
            os._exit(code)
    return pid


def _child(run: Run, place: Path, pipes: tuple[int, ...]) -> int:
    """In the fork: the command, and what Python does at its end."""
    os.chdir(place / "work")
    variables = _environment(run, place)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    tempfile.tempdir = None
    tempfile.gettempdir()  # it tries some folders, which is no attack, and needs a disk that is not full
    for number, pipe in ((0, os.open(os.devnull, os.O_RDONLY)), (1, pipes[0]), (2, pipes[1])):
        os.dup2(pipe, number)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    told = {"encoding": encoding or None, "errors": errors or None}
    sys.stdin, sys.stdout = open(0), open(1, "w", **told)  # type: ignore[call-overload]  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, **{**told, "errors": "backslashreplace"})  # type: ignore[call-overload]  # noqa: SIM115
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in run.closed:
            getattr(sys, name).close()
            setattr(sys, name, None)  # as Python does at its start
    _limit(run, _mapped() + MEMORY)
    try:
        attend(str(place), pipes[2], list(run.arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        atexit._run_exitfuncs()
        if sys.stdout is not None:
            sys.stdout.flush()
    return 0


def _mapped() -> int:
    """Bytes of address space that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _limit(run: Run, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if run.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.file_bytes, run.file_bytes))


def _hook(place: Path, told: int) -> None:
    """Tell of every socket, every program that is started, and every change outside the folder."""
    inside = (str(place.resolve()), os.devnull, "/dev/shm", "/proc/self")  # noqa: S108 (shared memory of libraries)
    with contextlib.suppress(FileNotFoundError):
        inside += (tempfile.gettempdir(),)  # another than ours where the environment names none that can be used

    def tell(event: str, detail: object) -> None:
        os.write(told, f"{event} {detail!r:.200}".replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n")

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
            tell(event, arguments[1:])
        elif event in _PROGRAMS and "/sbin/ldconfig" not in str(arguments[0]):  # how ctypes finds a library
            tell(event, arguments[:2])
        elif event in _CHANGES or (event == "open" and _writes(arguments)):
            for path in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
                if isinstance(path, str | bytes | os.PathLike):
                    whole = os.path.abspath(os.fsdecode(path))
                    if not whole.startswith(inside) and not any(cache in whole for cache in _CACHES):
                        tell(event, whole)

    sys.addaudithook(hook)


def _writes(arguments: tuple[object, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    if not isinstance(flags, int) or os.path.isdir(arguments[0]):  # type: ignore[arg-type]
        return False  # what is written in a folder without a name leaves nothing
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
