"""Keep libraries off the screen while this tool has the word."""

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
    """Keep open_clip's reports off the screen: it logs through the root logger, and thereby gives it a handler."""
    root = logging.getLogger()
    handlers, disabled = list(root.handlers), root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        logging.disable(disabled)
