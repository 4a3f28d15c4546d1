"""Lets ranks notice the end of their supervisor, even if it is killed, by a Unix socket to it.

The supervisor of a serving run listens, and every rank keeps one connection. A killed supervisor cannot tell its ranks
anything, but the kernel closes its sockets, which ends the ranks' reading from them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import NoReturn

from splash_trt.dist.watchdog import last_words

EXIT_ORPHANED = 71
COUNTS_PREFIX = "counts-"


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
    """From now on, end this process as soon as the process that listens at `path` ends.

    Before that, remove the folder of sockets that `path` is in, which a killed process cannot do. name: this process's,
    for the line on stderr.
    """
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(str(path))
    except OSError:
        _end(path.parent, name)
    threading.Thread(target=_watch, args=(line, path.parent, name), name="lifeline", daemon=True).start()


def _watch(line: socket.socket, folder: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        line.recv(1)
    _end(folder, name)


def remove_sockets(folder: Path) -> None:
    """Remove a run's folder, with its sockets and its files of frontends' counters; a folder with other files stays,
    with them. Several processes may do so at once."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_socket() or path.name.startswith(COUNTS_PREFIX):
                path.unlink(missing_ok=True)
        folder.rmdir()


def _end(folder: Path, name: str) -> NoReturn:
    remove_sockets(folder)
    last_words(f"{name}: its supervisor is gone")
    os._exit(EXIT_ORPHANED)
