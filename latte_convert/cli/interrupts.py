"""Ctrl-C and a scheduler's polite kill: work stops, cleans up and ends with a sentence. A second one ends it at once.

It imports no library, so that an interrupt is heeded from the first import on.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

SENTENCE = "interrupted."
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


def install() -> None:
    """Stop this process in good order at the first of these signals."""
    for number in _SIGNALS:
        signal.signal(number, stop)
    told = sys.unraisablehook

    def quietly(unraisable: Any) -> None:
        """A finaliser that is interrupted is no news: ``heed`` goes on with the interrupt."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            told(unraisable)

    sys.unraisablehook = quietly


def release() -> None:
    """Leave these signals to the system: what Python does at its end is no place for an exception."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def stop(number: int = signal.SIGINT, _frame: object = None) -> None:
    """Signal handler.

    Raises:
        KeyboardInterrupt: At the first signal.
    """
    if _received:
        os.write(2, f"latte: {SENTENCE}\n".encode())
        os._exit(128 + number)
    _received.append(number)
    raise KeyboardInterrupt


def interrupted() -> bool:
    """Whether a signal has come."""
    return bool(_received)


def heed() -> None:
    """Stop now if Python swallowed the interrupt: what is raised inside a callback or a finaliser is only printed.

    Raises:
        KeyboardInterrupt: A signal has come.
    """
    if interrupted():
        raise KeyboardInterrupt


def exit_code() -> int:
    """What an interrupted command exits with: 130 for Ctrl-C, 143 for a scheduler's kill."""
    return 128 + (_received or [signal.SIGINT])[0]
