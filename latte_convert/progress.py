"""How a long step tells what it has done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int], Callable[[], None]]
"""``progress(title, total)`` opens a step and returns a function that advances it by one."""


def silent(_title: str, _total: int) -> Callable[[], None]:
    """A progress that shows nothing."""
    return lambda: None
