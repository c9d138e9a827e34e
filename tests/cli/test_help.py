"""Help of every command, and how little it imports."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command

from latte_convert.cli.app import app


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['latte', '--help']\n"
        "from latte_convert.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'PIL', 'jinja2', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_import_is_light():
    code = "import sys, latte_convert; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("command", sorted(get_command(app).commands))
def test_every_command_has_help(latte, command):
    code, stdout, _ = latte(command, "--help")
    assert code == 0
    assert re.search(rf"Usage: .*latte {command} ", stdout)
