"""The command `splash-trt`, and what Ctrl-C does to it from the first import on."""

from __future__ import annotations

import sys
from typing import NoReturn

from splash_trt import interruption

EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Never a traceback for Ctrl-C: commands that run for long end in order, all else with one line and code 130."""
    interrupted = interruption.watch()
    try:
        from splash_trt.commands.group import run

        run()
    except KeyboardInterrupt:
        pass
    except Exception:
        if not interrupted.came:  # else of modules that were left half imported
            raise
    interruption.over()
    sys.stderr.write("splash-trt: interrupted\n")
    sys.exit(EXIT_INTERRUPTED)
