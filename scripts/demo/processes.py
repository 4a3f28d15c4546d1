"""The demo's child processes: each in a session of its own, so that Ctrl-C reaches the demo first, which ends them."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

END_S = 15.0  # for an orderly end; a server needs less
TAIL_LINES = 40


class Failure(RuntimeError):
    """What the demo ends with when a part of it fails, worded for its user."""


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, with all that it writes in `log`; ended, whatever happens in here."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it. A second Ctrl-C does not get in between."""
    if process.poll() is not None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for stop in (process.terminate, process.kill):
            stop()
            try:
                process.wait(END_S)
                return
            except subprocess.TimeoutExpired:
                continue
    finally:
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tail(log: Path) -> str:
    """The end of a log, for an error message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:]) or "    (empty)"
