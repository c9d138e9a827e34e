"""Several processes that share the work, as torchrun starts them.

All run the same program. Where they have done different things they exchange what came of it, and go on with all of it.
A process that fails brings its failure to the next exchange in place of a result: so all end at once, the first of
them says why, and all with its exit code.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

from latte_convert.environment import library_versions, tool_version
from latte_convert.errors import InputError, LatteError, first_line

T = TypeVar("T")

_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What the environment of a process has that was started with others."""
PATIENCE = "LATTE_PATIENCE"
"""Environment variable: seconds to wait for another process; half an hour where it is not set."""
_WAIT = 1800.0
_MOMENT = 2.0
_STOPPED = 143
"""Exit code of a process that was asked to end: by torchrun, too, when another one is lost."""


@dataclass(frozen=True)
class Failure:
    """Why a process ended.

    Attributes:
        message: The sentence.
        code: The exit code.
    """

    message: str
    code: int


class OthersFailed(LatteError):
    """Another process has failed.

    Attributes:
        failure: What the first of them that failed says.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Lost(LatteError):
    """Another process is gone, or does not answer."""


_together = False


def started() -> int:
    """Which of several processes this one was started as, from 0; 0 where it is the only one."""
    return int(os.environ["RANK"]) if several() else 0


def several() -> bool:
    """Whether this process was started with others."""
    found = [os.environ.get(name, "") for name in _STARTED]
    return all(found) and found[0].isdigit() and found[1].isdigit() and int(found[1]) > 1


def rank() -> int:
    """Which of the processes that have joined this one is; 0 where it is the only one."""
    return int(os.environ["RANK"]) if _together else 0


def size() -> int:
    """How many processes have joined."""
    return int(os.environ["WORLD_SIZE"]) if _together else 1


def join() -> None:
    """Join the processes that this one was started with, if there are any.

    Raises:
        InputError: They cannot be reached, or run other versions of the libraries.
    """
    global _together
    if not several() or _together:
        return
    import torch.distributed as dist

    try:
        wait = float(os.environ.get(PATIENCE) or _WAIT)
        dist.init_process_group("gloo", timeout=timedelta(seconds=wait))
    except (RuntimeError, ValueError) as error:  # a port in use, another machine that is not there, no number
        raise InputError(
            f"the processes cannot be joined: {first_line(error)}. Start all of them with torchrun, on a free port."
        ) from None
    _together = True
    versions = {"latte_convert": tool_version(), "python": platform.python_version(), **library_versions()}
    agree(versions, "version of {}", "Start all of them in the same environment")


def agree(mine: Mapping[str, str], what: str, advice: str) -> None:
    """Make sure that all processes see the same.

    Args:
        mine: What this one sees, by name.
        what: What that is, with ``{}`` for the name.
        advice: What to do where they differ.

    Raises:
        InputError: They do.
    """
    seen = exchange(dict(mine), what)
    for number, other in enumerate(seen):
        for name in sorted(seen[0].keys() | other.keys()):
            one, another = seen[0].get(name), other.get(name)
            if one != another:
                shown = f" ({another}, not {one})" if len(f"{one}{another}") < 40 else ""
                raise InputError(f"process {number} has another {what.format(name)} than process 0{shown}. {advice}.")


def exchange(mine: T, what: str) -> list[T]:
    """What each process has, in their order; every one of them takes part.

    Args:
        mine: Data.
        what: What it is: all must be at the same step.

    Raises:
        OthersFailed: One of them has failed.
        Lost: One of them is gone.
        InputError: They do different things.
    """
    if not _together:
        return [mine]
    seen = _gather((what, mine))
    if failure := next((each for each in seen if isinstance(each, Failure)), None):
        _leave()
        raise OthersFailed(failure)
    steps = [step for step, _ in seen]
    if len(set(steps)) > 1:
        raise InputError(
            f"the processes have come to different steps ({', '.join(steps)}): their inputs are not the same. Give all "
            "of them the same command, files and environment."
        )
    return [found for _, found in seen]


def _gather(mine: Any) -> list[Any]:
    import torch.distributed as dist

    seen: list[Any] = [None] * size()
    failed: list[RuntimeError] = []

    def gather() -> None:
        try:
            dist.all_gather_object(seen, mine)
        except RuntimeError as error:
            failed.append(error)

    # Python heeds no signal in a thread that waits inside of a library.
    waiting = Thread(target=gather, daemon=True)
    waiting.start()
    try:
        while waiting.is_alive():
            waiting.join(0.2)
    except KeyboardInterrupt:  # what started both sends a signal, too, when another process is lost or has failed
        waiting.join(_MOMENT)
        if waiting.is_alive() or not (failed or any(isinstance(each, Failure) for each in seen)):
            _forget()
            raise
    if failed:
        _forget()
        _end()
        raise Lost(
            f"another process was lost, or has not answered in time ({first_line(failed[0])}). What ended it is in the "
            "report of what started it, or in the system's log where memory was short. Run again; --work keeps what is "
            "done."
        ) from None
    return seen


def finish() -> None:
    """Leave when all have come to their end.

    Raises:
        OthersFailed: One of them has failed.
        Lost: One of them is gone.
    """
    if _together:
        exchange(None, "the end")
        _leave()


def settle(error: BaseException, failure: Failure) -> Failure:
    """What all processes end with where this one fails: the failure of the first of them that has one."""
    if isinstance(error, OthersFailed):
        return error.failure
    if not _together:
        return failure
    try:
        seen = _gather(failure)
    except Lost as lost:
        return Failure(str(lost), lost.exit_code) if failure.code == _STOPPED else failure
    _leave()
    return next(each for each in seen if isinstance(each, Failure))


def _forget() -> None:
    """Take part in no exchange any more."""
    global _together
    _together = False


def _end() -> None:
    """Heed no signal any more: what started the processes ends all of them when the first has ended."""
    with suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave() -> None:
    _forget()
    _end()
    import torch.distributed as dist

    dist.destroy_process_group()
