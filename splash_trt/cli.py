"""The command `splash-trt`: its entry point, which handles Ctrl-C from the first import on."""

from __future__ import annotations

import sys
from typing import NoReturn

from splash_trt import interruption

EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command. Ctrl-C gives no traceback: long-running commands end in order, others with one line and code
    130."""
    interrupted = interruption.watch()
    try:
        from splash_trt.commands.group import run

        run()
    except KeyboardInterrupt:
        pass
    except Exception:
        if not interrupted.came:  # if it came, the error may be from a module whose import Ctrl-C cut short
            raise
    interruption.over()
    sys.stderr.write("splash-trt: interrupted\n")
    sys.exit(EXIT_INTERRUPTED)
