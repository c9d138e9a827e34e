"""Keep the reports of libraries off the screen: ours say what matters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep Transformers' own bars and load reports off the screen: ours says what matters."""
    from transformers.utils import logging

    hf_logging: Any = logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_open_clip() -> Iterator[None]:
    """Keep open_clip's reports off the screen: it logs through the root logger, and thereby gives it a handler.

    The filter is this call's own, so that calls in several threads take nothing from each other.
    """
    root = logging.getLogger()
    nothing, idle = _Nothing(), logging.NullHandler()
    root.addFilter(nothing)  # what other loggers hand on to the root's handlers passes
    root.addHandler(idle)  # a root logger with a handler is given no other
    try:
        yield
    finally:
        root.removeHandler(idle)
        root.removeFilter(nothing)


class _Nothing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """No record passes."""
        return False
