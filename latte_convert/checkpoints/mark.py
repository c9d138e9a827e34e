"""The mark by which Transformers warns where a hybrid is loaded without this package: its attention is exact there.

An artifact's ``config.json`` is the source's with one entry more, a ``quantization_config`` of a method that
Transformers does not know. It warns of that, with the method's name, and loads the plain model, which can be used in
every way. A method it knew would block ``.half()`` and the like.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latte_convert.checkpoints.weights import read_config

CONFIG = "config.json"
ENTRY = "quantization_config"
METHOD = (
    "latte_convert (this is a hybrid, and its attention stays EXACT without latte_convert: pip install latte-convert, "
    "and `import latte_convert` first)"
)


def mark_config(path: Path) -> None:
    """Put the mark into a configuration file of Transformers."""
    config = {**read_config(path), ENTRY: {"quant_method": METHOD}}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_marked(config: Any) -> bool:
    """Whether a configuration of Transformers has the mark."""
    entry = getattr(config, ENTRY, None)
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    return isinstance(method, str) and method.startswith("latte_convert")


def remove_mark(config: Any) -> None:
    """Take the mark out of a configuration in memory, where it has one."""
    if is_marked(config):
        delattr(config, ENTRY)


@contextmanager
def without_warning() -> Iterator[None]:
    """Keep Transformers from warning of the mark where the hybrid is about to be made."""

    def unmarked(record: logging.LogRecord) -> bool:
        return METHOD not in record.getMessage()

    logger = logging.getLogger("transformers.quantizers.auto")
    logger.addFilter(unmarked)
    try:
        yield
    finally:
        logger.removeFilter(unmarked)
