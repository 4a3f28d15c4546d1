"""Keeps Ctrl-C from being lost: C code that is just importing something may swallow the KeyboardInterrupt."""

from __future__ import annotations

import signal
from types import FrameType


class Interruption:
    """The handler of SIGINT for a command, until the command has one of its own."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def watch() -> Interruption:
    """Installs the handler in place of Python's own. If SIGINT is ignored, as in a shell's background, it stays so."""
    handler = Interruption()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    return handler


def check() -> None:
    """Raises KeyboardInterrupt if Ctrl-C came before and the exception was swallowed."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interruption) and handler.came:
        raise KeyboardInterrupt


def over() -> None:
    """The exit code is known: another Ctrl-C, while all that was loaded is cleared away, makes no difference to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
