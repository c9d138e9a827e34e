"""The command line. Heavy imports live inside the commands, so that ``latte --help`` answers at once."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from latte_convert import processes
from latte_convert.cli import artifact, bench, conversion, evaluation, export, interrupts, report, schema
from latte_convert.cli.console import alert, flush_results, quiet, result
from latte_convert.cli.endings import ending
from latte_convert.errors import OutputError, UsageError

app = typer.Typer(
    name="latte",
    help="Convert pretrained transformers into linear-attention hybrids without training, and measure the cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SHARED = ("convert", "score", "eval")
"""What several processes can do together."""

app.command("score")(conversion.score)
app.command("convert")(conversion.convert)
app.command("eval")(evaluation.evaluate)
app.command("bench")(bench.bench)
app.command("export")(export.export)
app.command("inspect")(artifact.inspect)
app.command("verify")(artifact.verify)
app.command("restore")(artifact.restore)
app.command("merge")(artifact.merge)
app.command("push")(artifact.push)
app.command("report")(report.report)
app.command("schema")(schema.schema)


def _version(show: bool) -> None:
    if show:
        from latte_convert.environment import tool_version

        result(f"latte_convert {tool_version()}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    quiet_: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only results, warnings and errors: no progress, no tables.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command; they may stand behind it too."""
    quiet(quiet_)
    if processes.several() and context.invoked_subcommand not in _SHARED:
        raise UsageError(f"several processes share {', '.join(_SHARED)}; start this command without torchrun.")


def main() -> None:
    """Entry point: turns every error into a sentence on stderr and an exit code."""
    _options_first()
    debug = "--debug" in sys.argv
    if processes.started() and not debug:  # the first of several processes speaks for all
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (to the end)
    try:
        app()
    except SystemExit as end:
        code = int(end.code or 0)
        if code == 130:  # typer turns Ctrl-C into a silent exit
            alert(f"latte: {interrupts.SENTENCE}")
            code = interrupts.exit_code()
        _leave(code)
    except BaseException as error:
        if debug and not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        failure = processes.settle(error, processes.Failure(*ending(error)))
        alert(f"latte: {failure.message}")
        _leave(failure.code)


def _options_first() -> None:
    """Move what every command takes before it: people write it behind."""
    for flag in ("--debug", "--quiet", "-q"):
        if flag in sys.argv[2:]:
            sys.argv.remove(flag)
            sys.argv.insert(1, flag)


def _leave(code: int) -> None:
    """Exit when all results are printed; a full disk or a closed pipe shows only now."""
    try:
        flush_results()
    except OutputError as error:
        alert(f"latte: {error}")
        code = error.exit_code
    if code and processes.several():  # a thread may still wait for another process, inside of a library
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
