"""How a command ends: from an error to a sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from latte_convert.cli import interrupts
from latte_convert.errors import InputError, LatteError, first_line, is_shortage

_LESS = {
    "score": "Lower --samples or --resolution, or take a smaller model",
    "convert": "Lower --samples or --resolution, or take a smaller model",
    "eval": "Lower --batch-size or --samples",
    "bench": "Give shorter --tokens or smaller --resolutions",
}
"""What takes less memory, by command."""


def ending(error: BaseException) -> tuple[str, int]:
    """What to say about an error, and the exit code."""
    # An import that is interrupted may end as another error.
    if isinstance(error, KeyboardInterrupt) or interrupts.interrupted():
        return interrupts.SENTENCE, interrupts.exit_code()
    shortage = next(filter(is_shortage, _chain(error)), None)
    if shortage is not None:
        told = f"{error} " if isinstance(error, InputError) else ""
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        less = _LESS.get(command, "Close other programs")
        reason = first_line(shortage).rstrip(".") if str(shortage) else "this machine has no more"
        return f"{told}out of memory: {reason}. {less}, or use a machine or --device with more.", InputError.exit_code
    if isinstance(error, LatteError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or first_line(error)}.", InputError.exit_code
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # Path.resolve, before Python 3.13
        return f"{error}: a link leads back to itself. Remove it.", InputError.exit_code
    return f"internal error: {type(error).__name__}: {error}. Run again with --debug, and report it.", 1


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those it came from; one that a sentence has replaced counts, too."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
