"""The exception tree. Every error a user can cause carries the exit code of the command line contract."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import ClassVar

from latte_convert.wording import some


class LatteError(Exception):
    """Base of every error raised on purpose; ``exit_code`` is what the command line exits with."""

    exit_code: ClassVar[int] = 1


class UsageError(LatteError):
    """The call itself makes no sense: options that exclude each other, a missing argument."""

    exit_code = 2


class InputError(LatteError):
    """Something the user gave cannot be used."""

    exit_code = 3


class CheckpointError(InputError):
    """A model that cannot be found, loaded, or converted."""


class DataError(InputError):
    """Calibration data that is missing, empty, or of the wrong kind."""


class RecipeError(InputError):
    """A recipe that does not validate."""


class OutputError(InputError):
    """An output that cannot be written: it exists, or the disk is full."""


class GateError(LatteError):
    """A quality gate that was asked for is not met."""

    exit_code = 4


class IntegrityError(LatteError):
    """An artifact that is not what its manifest says it is."""

    exit_code = 5


def nearest(word: str, choices: Iterable[str], *, limit: int = 3) -> str:
    """Phrase for an error message: the valid choices closest to ``word``.

    Args:
        word: What the user wrote.
        choices: What would have been valid.
        limit: How many to name.

    Returns:
        ``"nearest: a, b"``, or ``"choose from: a, b, c"`` where nothing is close, or ``"there are none"``.
    """
    options = list(dict.fromkeys(choices))
    if not options:
        return "there are none"
    close = difflib.get_close_matches(word, options, n=limit, cutoff=0.5)
    if close:
        return f"nearest: {', '.join(close)}"
    return f"choose from: {some(options, limit)}"


_ALLOCATION = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
"""How PyTorch and its libraries report a failed allocation; on a CPU it is a plain RuntimeError."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory is short, of whichever library."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _ALLOCATION)


def first_line(error: BaseException) -> str:
    """The first line of an error, at most 300 characters of it, or its kind where it says nothing."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


_LINE = 300
