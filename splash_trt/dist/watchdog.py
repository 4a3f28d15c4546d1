"""Ends a rank that cannot go on, with one line on stderr that says where it was and which rank it waited for.

A second thread of the rank looks at the board a few times a second. It never calls MPI, since that is where a rank that
hangs is stuck. It ends the process when
- the rank has been in one phase other than idle (computing, a collective, its start-up) for longer than the deadline,
- this rank idles, and another rank of the node has given no sign of life for that long, as its process is stopped,
- SIGTERM arrives, which mpirun sends to the other ranks when one has died,
- the parent process is gone: mpirun was killed, which ranks can survive. They also remove what mpirun would have
  removed.
It uses os._exit, upon which mpirun ends the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence

from splash_trt import environment
from splash_trt.dist.board import Phase, Row, Watch

EXIT_STUCK = 70
EXIT_TERMINATED = 128 + signal.SIGTERM
_WAITS_FOR_EVER = (Phase.IDLE, Phase.FAILED)
_STOP = b"\0"


class Watchdog:
    """Guards the rank that `watch` belongs to, from `start` to `stop`; both are called on the main thread."""

    def __init__(self, watch: Watch, deadline_s: float, startup_deadline_s: float) -> None:
        self._watch = watch
        self._deadline_ns = int(deadline_s * 1e9)
        self._startup_deadline_ns = int(startup_deadline_s * 1e9)
        self._interval_s = min(0.25, deadline_s / 10)
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._guard, name="watchdog", daemon=True)
        # Signals arrive here as bytes (set_wakeup_fd). A Python handler would only run when the main thread returns
        # from MPI, which may be never.
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)

    def start(self) -> None:
        self._watch.beat()
        signal.signal(signal.SIGTERM, _leave_to_watchdog)
        signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; SIGTERM has its default meaning again."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._outbox.send(_STOP)
        self._thread.join()
        self._inbox.close()
        self._outbox.close()

    def _guard(self) -> None:
        last = awake_since = time.monotonic_ns()
        while True:
            ready, _, _ = select.select([self._inbox], [], [], self._interval_s)
            received = self._inbox.recv(64) if ready else b""
            if _STOP in received:
                return
            if signal.SIGTERM in received:
                self._end(f"ended by SIGTERM in {self._doing()}; {self._suspect()}", EXIT_TERMINATED)
            now = time.monotonic_ns()
            # A process that was stopped and continued must not blame others for the time in which it did not run.
            if now - last > (self._interval_s + 1) * 1e9:
                awake_since = now
            last = now
            self._watch.beat()
            self._check(now, awake_since)

    def _check(self, now: int, awake_since: int) -> None:
        if os.getppid() != self._parent:
            _remove_segments()
            _remove_launcher_folder(self._parent)
            self._end(f"mpirun (pid {self._parent}) is gone, in {self._doing()}", EXIT_STUCK)
        own = self._watch.row()
        if own.phase not in _WAITS_FOR_EVER:
            stuck_ns = now - max(own.since_ns, awake_since)
            if stuck_ns > self._deadline(own):
                self._end(f"no progress for {stuck_ns / 1e9:.1f} s in {self._doing()}; {self._suspect()}", EXIT_STUCK)
            return
        for row in self._watch.board.read():
            silent_ns = now - max(row.beat_ns, awake_since)
            if row.beat_ns and row.rank != own.rank and silent_ns > self._deadline(row):
                silence = f"rank {row.rank} has given no sign of life for {silent_ns / 1e9:.1f} s ({row.place})"
                self._end(f"in {self._doing()}; {silence}", EXIT_STUCK)

    def _deadline(self, row: Row) -> int:
        return self._startup_deadline_ns if row.phase is Phase.STARTING else self._deadline_ns

    def _doing(self) -> str:
        row = self._watch.row()
        return row.phase.text + (f" (layer {row.layer})" if row.layer >= 0 else "")

    def _suspect(self) -> str:
        return suspect(self._watch.board.read(), self._watch.rank, time.monotonic_ns())

    def _end(self, message: str, code: int) -> None:
        step = self._watch.step
        place = "before the first step" if step < 0 else f"step {step}"
        last_words(f"rank {self._watch.rank}: {place}: {message}")
        os._exit(code)


def last_words(text: str) -> None:
    """Writes a line to stderr, unbuffered. If that fails nothing is raised: a rank whose mpirun is gone has a broken
    pipe there, and must still do what comes after."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def suspect(rows: Sequence[Row], rank: int, now_ns: int) -> str:
    """Names the rank to look at, from `rank`'s view of the board: one that failed or is gone, else the one that is
    furthest behind."""
    others = [row for row in rows if row.rank != rank and row.pid]
    for row in others:
        if row.phase is Phase.FAILED:
            return f"rank {row.rank} failed (step {row.step})"
    for row in others:
        if not _exists(row.pid):
            return f"rank {row.rank}'s process is gone ({row.place})"
    if not others:
        return "there are no other ranks here"
    last = min(rows, key=lambda row: (row.step, row.counter, row.beat_ns))
    first = max(rows, key=lambda row: (row.step, row.counter))
    if (last.step, last.counter) == (first.step, first.counter) and now_ns - last.beat_ns < 2e9:
        return "all ranks are equally far"
    if last.rank == rank:
        return f"this rank is behind the others (rank {first.rank}: {first.place})"
    return describe(last, now_ns)


def describe(row: Row, now_ns: int) -> str:
    """Where another rank is, and for how long it has given no sign of life if that is long."""
    silent_s = (now_ns - row.beat_ns) / 1e9
    silence = f", no sign of life for {silent_s:.1f} s" if row.beat_ns and silent_s > 2 else ""
    return f"rank {row.rank} is behind ({row.place}{silence})"


def _remove_segments() -> None:
    """Removes the files through which Open MPI's ranks share memory, which mpirun removes unless it is killed."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/sm_segment." in line or "/vader_segment." in line}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # every rank maps the files of all, so another may be faster
            os.unlink(path)


def _remove_launcher_folder(mpirun: int) -> None:
    """Removes mpirun's folder of temporary files, which it removes itself unless it is killed."""
    folder = environment.launcher_folder()
    # Its name ends in mpirun's pid. Nothing else is removed, whatever the environment says.
    if folder is not None and folder.name.endswith(f".{mpirun}"):
        shutil.rmtree(folder, ignore_errors=True)  # the other ranks do the same


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _leave_to_watchdog(signum: int, frame: object) -> None:
    """Does nothing: a handler must be installed for Python to write the signal's byte, which the thread reads."""
