"""Write a report on its own: JSON for machines, HTML for people."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latte_convert.artifact.files import write_json
from latte_convert.errors import OutputError
from latte_convert.report.html import write_html
from latte_convert.report.schema import Report


def check_report_target(path: Path, *, overwrite: bool) -> None:
    """Refuse a report file that could not be written, before any work is done for it.

    Raises:
        OutputError: It exists and ``overwrite`` is off, it is a directory, or lies where nothing can be written.
    """
    if os.path.isdir(path):  # Path.is_dir raises where a name is too long
        raise OutputError(f"{path} is a directory; give a .json or .html file.")
    if os.path.lexists(path) and not overwrite:
        raise OutputError(f"{path} exists already. Choose another --out, or pass --overwrite to replace it.")
    home = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise OutputError(f"{path} cannot be written: {home} is no folder that you may write to. Choose another --out.")


def write_report(report: Report, path: Path) -> None:
    """Write a report as ``.json`` or ``.html``, whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    if path.suffix == ".html":
        _write(path, lambda temporary: write_html(report, temporary))
    else:
        write_document(report.model_dump(mode="json"), path)


def write_document(content: Any, path: Path) -> None:
    """Write a JSON document, whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    _write(path, lambda temporary: write_json(temporary, content))


def write_text(text: str, path: Path) -> None:
    """Write a page as UTF-8, whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    _write(path, lambda temporary: temporary.write_bytes(text.encode()))


def _write(path: Path, fill: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            fill(temporary)
            temporary.chmod(path.stat().st_mode if path.exists() else 0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} was not written: {error.strerror or error}.") from error
