"""Libraries that only an evaluation needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from latte_convert.errors import InputError


def need(module: str) -> Any:
    """Import a library of the ``eval`` extra.

    Raises:
        InputError: It is not installed; says how to get it.
    """
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f'this task needs {module.partition(".")[0]}, which is not installed: pip install "latte-convert[eval]".'
        ) from None
