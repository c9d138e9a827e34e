"""What the command line shows: results on stdout, everything else on stderr, plain text off a terminal."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from latte_convert.cli import interrupts
from latte_convert.errors import OutputError
from latte_convert.wording import duration, printable, rounded_down

if TYPE_CHECKING:
    from pathlib import Path

    from latte_convert.report.schema import Report

_NEWS = 60.0
"""Seconds between two lines about a stage, off a terminal."""

Advance = Callable[[], None]


def fancy(stream: Any = None) -> bool:
    """Whether colours and bars may be used on a stream (stderr by default)."""
    stream = stream or sys.stderr
    return (
        stream is not None
        and bool(stream.isatty())
        and "NO_COLOR" not in os.environ
        and os.environ.get("TERM") != "dumb"
    )


_QUIET = threading.Event()


def quiet(wish: bool) -> None:
    """Whether only results, warnings and errors are shown."""
    (_QUIET.set if wish else _QUIET.clear)()


def note(message: str) -> None:
    """One line for the person at the terminal, on stderr; ``--quiet`` leaves it out."""
    if not _QUIET.is_set():
        alert(message)


def alert(message: str) -> None:
    """A warning or an error, on stderr; work goes on where it cannot be written."""
    with suppress(OSError, ValueError):  # a full disk, or a stream that is closed
        _write(sys.stderr, message)


def result(text: str) -> None:
    """One line of result, on stdout.

    Raises:
        OutputError: It cannot be printed.
    """
    with _printing():
        _write(sys.stdout, text)


def document(content: Any) -> None:
    """The one JSON document of ``--json``, on stdout; strict JSON, no NaN.

    Raises:
        OutputError: It cannot be printed.
    """
    text = json.dumps(content, indent=2, allow_nan=False)
    with _printing():
        _write(sys.stdout, text)


def flush_results() -> None:
    """Bring the results out of this process.

    Raises:
        OutputError: They cannot be printed.
    """
    with _printing():
        if sys.stdout is not None:
            sys.stdout.flush()


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # a full disk, a closed pipe, a closed stream
        with suppress(OSError, ValueError):  # or Python tries again at exit, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"the results cannot be printed: {getattr(error, 'strerror', None) or error}.") from None


def _write(stream: Any, text: str) -> None:
    """Write a line to a stream that may be closed, or may not know every character; names can hold escape codes."""
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")


class _PlainHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write one warning."""
        alert(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Show the package's warnings on stderr while a command runs."""
    logger = logging.getLogger("latte_convert")
    handler = _PlainHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def progress() -> Iterator[Callable[[str, int], Advance]]:
    """A progress for ``convert`` and ``score``: bars with the time left, or one line a stage off a terminal."""
    if _QUIET.is_set() or not fancy():
        yield _plain_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bars:

        def start(title: str, total: int) -> Advance:
            if not total:
                bars.console.print(title, highlight=False)
            task = bars.add_task(title, total=total)

            def advance() -> None:
                interrupts.heed()
                bars.advance(task)

            return advance

        yield start


def _plain_progress(title: str, total: int) -> Advance:
    """A line for the beginning and the end of a stage, and one a minute with the time left."""
    started, done = time.monotonic(), 0
    told = started
    note(f"{title}: {total} steps" if total else title)

    def advance() -> None:
        nonlocal done, told
        interrupts.heed()
        done += 1
        now = time.monotonic()
        if done == total:
            note(f"{title}: done in {now - started:.1f} s")
        elif now - told >= _NEWS:
            told, left = now, (now - started) / done * (total - done)
            note(f"{title}: {done} of {total}, about {duration(left)} left")

    return advance


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """A table on stderr.

    Args:
        title: Its heading.
        columns: Headings of the columns.
        rows: Cells as text.
        right: Columns of numbers, which are aligned to the right.
    """
    if _QUIET.is_set():
        return
    if not fancy():
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        note(title)
        for row in [columns, *rows]:
            cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            note("  " + "  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(printable(cell)) for cell in row))
    screen = Console(stderr=True)
    screen.print(f"\n[bold]{escape(title)}[/bold]")
    screen.print(shown)


def site_table(report: Report) -> None:
    """The score table: sites in order of the module tree, bars of sensitivity, what becomes of each."""
    scores = [s.score.value for s in report.sites if s.score and s.score.value is not None]
    rows = []
    for site in report.sites:
        value = site.score.value if site.score else None
        bar = "█" * _length(value, scores) if value is not None else ""
        fate = "convert" if site.converted else "exact" if site.eligible else f"exact: {site.reason}"
        score = f"{value:.4g}" if value is not None else "-"
        rows.append((site.name, site.tower, site.layout or "-", score, bar, fate))
    table(
        f"Sensitivity of {sum(s.eligible for s in report.sites)} eligible attention sites "
        "(low is robust; logarithmic bars)",
        ("site", "tower", "tokens", "score", "", "becomes"),
        rows,
        right=(3,),
    )


def _length(value: float, scores: Sequence[float]) -> int:
    """Characters of a bar, 1 to 16: scores of one model span decades, so the bars are logarithmic."""
    positive = [score for score in scores if score > 0]
    if value <= 0 or not positive or max(positive) == min(positive):
        return 1
    return 1 + round(15 * math.log(value / min(positive)) / math.log(max(positive) / min(positive)))


def fidelity_table(report: Report) -> None:
    """Held-out fidelity, and what it cost or saved."""
    if report.fidelity is None or report.cost is None:
        return
    rows = [
        (
            name + (" *" if name == report.fidelity.primary else ""),
            rounded_down(a.alike),
            f"{rounded_down(a.interval[0])} to {rounded_down(a.interval[1])}" if a.interval else "-",
            rounded_down(a.cosine),
            f"{a.relative_error:.3f}" if a.relative_error is not None else "-",
        )
        for name, a in report.fidelity.outputs.items()
    ]
    table(
        f"Fidelity on {report.fidelity.samples} held-out samples ({report.made})",
        ("output", "likeness", "95% interval", "cosine", "relative error"),
        rows,
        right=(1, 2, 3, 4),
    )
    cost = report.cost
    if cost.flops.original:
        note(
            f"attention FLOPs: {_si(cost.flops.original)} -> {_si(cost.flops.hybrid)} per sample; "
            f"forward: {cost.forward_ms['original']:.0f} ms -> {cost.forward_ms['hybrid']:.0f} ms on {cost.device}"
        )
    calibration = report.calibration
    note(
        f"samples: {calibration.requested} asked, {calibration.used} fitted, {calibration.held_out} held out, "
        f"{len(calibration.skipped)} skipped, {calibration.truncated} truncated"
    )


def next_step(report: Report, directory: Path) -> None:
    """Whether an artifact is worth it, and the command to type next."""
    from latte_convert.report.verdict import worth_of

    worth = worth_of(report, str(directory))
    if worth is not None:
        note(worth.verdict)
        note(f"next: {worth.command}")


def _si(count: float) -> str:
    """A large number with three digits and a unit."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f}"
