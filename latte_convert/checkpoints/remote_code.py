"""Python code that comes with a checkpoint: it runs where the user allows it, without a question on the terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

_LOCK = threading.RLock()  # loads take turns: they share parts of the library


@contextmanager
def remote_code(allowed: bool) -> Iterator[None]:
    """Let Transformers import a checkpoint's own code, or not, whatever the checkpoint or a library asks for.

    Its loaders ask on the terminal where they get no ``trust_remote_code``, as open_clip calls them, and a
    configuration may hold the flag itself. Relies on private names of ``transformers.dynamic_module_utils`` (5.24); the
    explicit flag of every loader holds without them.
    """
    from transformers import dynamic_module_utils

    library: Any = dynamic_module_utils
    swaps: dict[str, Any] = {"TIME_OUT_REMOTE_CODE": 0}  # an error, not a question
    if not allowed:
        swaps["get_class_in_module"] = _refuse
    with _LOCK, ExitStack() as stack:
        for name, value in swaps.items():
            if hasattr(library, name):
                stack.callback(setattr, library, name, getattr(library, name))
                setattr(library, name, value)
        yield


ADVICE = "read that code, then pass --trust-remote-code"
"""What to do where code of a checkpoint is wanted."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ValueError(f"it comes as Python code: {ADVICE}")


def wants_code(error: BaseException) -> bool:
    """Whether a loader failed for lack of the flag."""
    return "trust_remote_code" in str(error) or ADVICE in str(error)
