"""``latte`` and ``python -m latte_convert``: an interrupt is heeded from the first import on."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; see ``latte_convert.cli.app``."""
    try:
        for kill in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kill, signal.default_int_handler)
        from latte_convert.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("latte: interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
