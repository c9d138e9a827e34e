"""The command line as tests call it."""

from __future__ import annotations

import sys

import pytest

from latte_convert.cli.app import main


@pytest.fixture
def latte(monkeypatch, capsys):
    """Run the command line in this process: ``latte(*args) -> (exit code, stdout, stderr)``."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latte", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
