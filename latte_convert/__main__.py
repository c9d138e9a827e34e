"""``latte`` and ``python -m latte_convert``: an interrupt is heeded from the first import on."""

from __future__ import annotations

import sys

from latte_convert.cli import interrupts


def main() -> None:
    """Run the command line; see ``latte_convert.cli.app``."""
    try:
        interrupts.install()
        from latte_convert.cli.app import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write(f"latte: {interrupts.SENTENCE}\n")
        sys.exit(interrupts.exit_code())
    finally:
        interrupts.release()


if __name__ == "__main__":
    main()
