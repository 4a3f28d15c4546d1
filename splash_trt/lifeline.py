"""A Unix socket whose far end is another process: when that process ends, however it does, reading says so.

The supervisor of a serving run listens; every rank keeps one connection. A killed supervisor cannot tell its ranks
anything, but its sockets close.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

EXIT_ORPHANED = 71


class Lifeline:
    """The supervisor's end: accepts connections and keeps them until it closes or the process ends."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(1024)
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="lifeline", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._held.append(self._socket.accept()[0])
            except OSError:  # closed
                return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for held in self._held:
            held.close()


def hold(path: Path, name: str) -> None:
    """End this process within a moment of the end of the process that listens at `path`. name: for the last words."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))
    threading.Thread(target=_watch, args=(line, name), name="lifeline", daemon=True).start()


def _watch(line: socket.socket, name: str) -> None:
    line.recv(1)
    os.write(2, f"{name}: its supervisor is gone\n".encode())
    os._exit(EXIT_ORPHANED)
