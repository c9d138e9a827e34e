"""How a long step tells what it has done, and how long it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int], Callable[[], None]]
"""``progress(title, total)`` opens a stage and returns a function that advances it by one step; a stage of no steps is
news."""


def silent(_title: str, _total: int) -> Callable[[], None]:
    """A progress that shows nothing."""
    return lambda: None


def bars(title: str, total: int) -> Callable[[], None]:
    """A progress of bars: widgets in a notebook, lines on a terminal, nothing in a redirected log."""
    from tqdm.auto import tqdm

    if not total:
        tqdm.write(title, file=sys.stderr)
        return lambda: None
    bar = tqdm(total=total, desc=title, disable=None)

    def advance() -> None:
        bar.update()
        if bar.n >= total:
            bar.close()

    return advance


def progress_of(wish: Progress | bool) -> Progress:
    """The progress that a caller asks for: True stands for ``bars``, False for none."""
    if callable(wish):
        return wish
    return bars if wish else silent


class Stopwatch:
    """Wall time of stages.

    Attributes:
        seconds: By stage, in the order in which they first ran.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of the context to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
