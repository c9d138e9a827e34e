"""The command line. Heavy imports live inside the commands, so that ``latte --help`` answers at once."""

from __future__ import annotations

import signal
import sys
import traceback
from typing import Annotated

import typer

from latte_convert.cli import artifact, bench, conversion, evaluation, report, schema
from latte_convert.cli.console import interrupt, interrupted, note
from latte_convert.errors import LatteError

app = typer.Typer(
    name="latte",
    help="Convert pretrained transformers into linear-attention hybrids without training, and measure the cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("score")(conversion.score)
app.command("convert")(conversion.convert)
app.command("eval")(evaluation.evaluate)
app.command("bench")(bench.bench)
app.command("inspect")(artifact.inspect)
app.command("verify")(artifact.verify)
app.command("restore")(artifact.restore)
app.command("report")(report.report)
app.command("schema")(schema.schema)


def _version(show: bool) -> None:
    if show:
        from latte_convert.environment import tool_version

        sys.stdout.write(f"latte_convert {tool_version()}\n")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Entry point: turns every error into a sentence on stderr and an exit code."""
    debug = "--debug" in sys.argv
    if debug and sys.argv.index("--debug") > 1:  # accept it behind the command too
        sys.argv.remove("--debug")
        sys.argv.insert(1, "--debug")
    for kill in (signal.SIGINT, signal.SIGTERM):  # a scheduler's polite kill cleans up like Ctrl-C
        signal.signal(kill, interrupt)
    try:
        app()
    except LatteError as error:
        _fail(str(error), error.exit_code, debug)
    except SystemExit as end:
        if end.code == 130:  # typer has turned Ctrl-C into an exit without a word
            note("latte: interrupted.")
        raise
    except KeyboardInterrupt:
        _fail("interrupted.", 130, debug=False)
    except (BrokenPipeError, UnicodeEncodeError) as error:
        _fail(f"the results cannot be printed: {error}", 1, debug)
    except MemoryError as error:
        _fail(f"out of memory: {error}. Use fewer tokens (a smaller model or resolution).", 1, debug)
    except Exception as error:
        _fail(
            f"internal error: {type(error).__name__}: {error}. Run again with --debug, and report it.",
            1,
            debug,
        )


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    if interrupted():  # an import that is interrupted may end as another error
        message, code = "interrupted.", 130
    note(f"latte: {message}")
    sys.exit(code)


if __name__ == "__main__":
    main()
