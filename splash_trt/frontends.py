"""The frontends of a run: processes that share a port, started and watched by the supervisor or by rank 0.

    clients ── one port, a queue of connections for each frontend ── frontend 0 … K-1 ── one socket each ── rank 0

Each is a child with two descriptors of ours. One is its lifeline: it ends when this process does, and what is sent over
it every few seconds its event loop sends back. What it writes comes through the other, so that it holds none of this
process's own streams: a child that holds a rank's would keep a dead mpirun waiting.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from splash_trt import environment
from splash_trt.dist.watchdog import last_words
from splash_trt.frontend.connection import open_sockets
from splash_trt.frontend.main import ENDING, EXIT_USAGE
from splash_trt.frontend.member import Member, member_name
from splash_trt.frontend.options import Options, as_flags

BEAT_S = 2.0
MAX_MISSED = 5  # beats in a row without an answer: 10 s
START_S = 120.0  # until it must have begun to answer
END_S = 8.0
RESTART_S = 0.5  # after one was killed
RESTART_FAILED_S = 3.0  # after one ended by itself: if that is because the engine ended, the whole run is about to
MAX_RESTARTS, RESTARTS_WITHIN_S = 5, 60.0
EXIT_FRONTEND = 72
BEAT = b"?"


class _Child:
    """One frontend's process and this process's ends of its two descriptors."""

    def __init__(self, command: list[str], sockets: list[socket.socket], again: bool) -> None:
        """again: it takes another's place."""
        self.again = again
        self.lifeline, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[opened.fileno() for opened in sockets],
                env=environment.for_child(),
                start_new_session=True,  # mpirun ends a rank's whole process group; it is to outlive that for a moment
            )
        assert self.process.stdout is not None
        self.lifeline.setblocking(False)
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._line = b""
        self.answers = False
        """It has begun to."""
        self.num_missed = 0
        self._started = time.monotonic()

    def beat(self) -> bool:
        """Ask for a sign of life; False if there was none for too long."""
        self.num_missed += self.answers or time.monotonic() > self._started + START_S
        try:
            self.lifeline.send(BEAT)
        except OSError:
            pass  # its queue is full, or it has just ended
        return self.num_missed <= MAX_MISSED

    def hear(self) -> bytes:
        """What came over the lifeline; empty if it has ended."""
        try:
            data = self.lifeline.recv(4096)
        except BlockingIOError:
            return BEAT
        except OSError:
            return b""
        if BEAT in data:
            self.answers, self.num_missed = True, 0
        return data

    def pass_on(self) -> None:
        """Whole lines of what it wrote."""
        while True:
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._line = (self._line + data).split(b"\n")
            if not data and self._line:
                lines, self._line = [self._line], b""
            for line in lines:
                last_words(line.decode(errors="replace"))
            if not data:
                return

    def close(self) -> None:
        self.lifeline.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Frontends:
    """Starts them at once. Until `close`, one that dies ends all of them, or with `restarts` another takes its place.

    `code` is None until all have ended: then 0 if that was in order, which it is once a signal has asked one of them or
    `end` was called. failed: called from a thread when the run cannot go on, with the code and why.
    """

    def __init__(
        self,
        options: Options,
        count: int,
        folder: Path,
        *,
        restarts: bool,
        failed: Callable[[int, str], None],
        beat_s: float = BEAT_S,
    ) -> None:
        """folder: of the run, for the counts that they share. ValueError if nothing can listen on the port."""
        self._options = options
        self._count = count
        self._folder = folder
        self._restarts = restarts
        self._failed = failed
        self._beat_s = beat_s
        self._run, self._began_s = uuid.uuid4().hex, time.monotonic()
        self._sockets = open_sockets(options.host, options.port, count)
        self._children: dict[int, _Child] = {}
        self._due: dict[int, float] = {}
        """When to start which one again."""
        self._deaths: list[float] = []
        self._ending = self._closing = False
        self.code: int | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for number in range(count):
            self._start(number, again=False)
        self._thread = threading.Thread(target=self._watch, name="frontends", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._sockets[0][0].getsockname()[1]
        return port

    def processes(self) -> list[int]:
        """Their process ids, by their numbers."""
        return [child.process.pid for _, child in sorted(self._children.items())]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Let them finish what is under way, as after the signal `number`; a second time: at once. May be called by a
        signal handler."""
        self._ending = True
        for child in list(self._children.values()):
            # One that is still being loaded would answer SIGINT with a traceback.
            child.process.send_signal(number if child.answers else signal.SIGTERM)
        self._wake.send(b"\0")

    def await_end(self, seconds: float) -> None:
        """The engine has ended, upon which they end by themselves: none is started again."""
        self._closing = self._ending = True
        self._wake.send(b"\0")
        self._thread.join(seconds)

    def close(self) -> None:
        """They end within a second, told of by the ends of their lifelines."""
        self._closing = self._ending = True
        for child in list(self._children.values()):
            child.lifeline.shutdown(socket.SHUT_WR)
        self._wake.send(b"\0")
        self._thread.join(END_S)
        if self._thread.is_alive():
            for child in list(self._children.values()):
                child.process.kill()
            self._thread.join()
        for opened in [*(opened for group in self._sockets for opened in group), self._wake, self._woken]:
            opened.close()

    def _start(self, number: int, again: bool) -> None:
        sockets = self._sockets[number]
        member = Member(
            number=number,
            count=self._count,
            sockets=tuple(opened.fileno() for opened in sockets),
            folder=str(self._folder),
            run=self._run,
            began_s=self._began_s,
            again=again,
        )
        child = self._children[number] = _Child(_command(self._options, member), sockets, again)
        self._selector.register(child.lifeline, selectors.EVENT_READ, number)
        self._selector.register(child.output, selectors.EVENT_READ, number)

    def _watch(self) -> None:
        next_beat = time.monotonic() + self._beat_s
        while self._children or self._due:
            next_time = min([next_beat, *self._due.values()])
            for key, _ in self._selector.select(max(0.0, next_time - time.monotonic())):
                if key.data is None:
                    self._woken.recv(4096)
                elif key.data in self._children:
                    self._look(key.data, self._children[key.data])
            now = time.monotonic()
            if self._ending:
                self._due.clear()
            for number in [number for number, at in self._due.items() if at <= now]:
                del self._due[number]
                last_words(f"{self._name(number)} is started again")
                self._start(number, again=True)
            if now >= next_beat:
                next_beat = now + self._beat_s
                self._beat()
        if self.code is None:
            self.code = 0

    def _beat(self) -> None:
        for number, child in self._children.items():
            if not child.beat():
                silent_s = MAX_MISSED * self._beat_s
                last_words(f"{self._name(number)} has given no sign of life for {silent_s:g} s; it is killed")
                child.process.kill()

    def _look(self, number: int, child: _Child) -> None:
        child.pass_on()
        heard = child.hear()
        if ENDING in heard and not self._ending:
            self._end_others(number)
        if not heard:
            child.process.wait()
            child.pass_on()
            self._selector.unregister(child.lifeline)
            self._selector.unregister(child.output)
            child.close()
            del self._children[number]
            self._ended(number, child.process.returncode, child.again)

    def _end_others(self, number: int) -> None:
        """A signal asked one of them to end: all do."""
        self._ending = True
        for other, child in self._children.items():
            if other != number:
                child.process.send_signal(signal.SIGTERM)

    def _ended(self, number: int, code: int, again: bool) -> None:
        # One that is still being loaded, or is just ending, has no answer of its own to a signal.
        if self._closing or (self._ending and code in (0, -signal.SIGTERM, -signal.SIGINT)):
            return
        what = f"{self._name(number)} {how_it_ended(code)}"
        # What was right when the run began is wrong for a while when the engine is built anew in its folder.
        wrong = code == EXIT_USAGE and not again
        if not self._restarts or self._ending or wrong or self._dies_often():
            self.code = code if code > 0 else EXIT_FRONTEND
            self._ending = True
            self._failed(self.code, what)
            return
        last_words(what)
        self._due[number] = time.monotonic() + (RESTART_S if code < 0 else RESTART_FAILED_S)

    def _dies_often(self) -> bool:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if at > now - RESTARTS_WITHIN_S] + [now]
        return len(self._deaths) > MAX_RESTARTS * self._count

    def _name(self, number: int) -> str:
        return f"the {member_name(number, self._count)}" if self._count == 1 else member_name(number, self._count)


def how_it_ended(code: int) -> str:
    """A process's exit code in words, as subprocess gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _command(options: Options, member: Member) -> list[str]:
    flags = ["--engine", options.engine, "--model-name", options.model_name, "--keep-engine"]
    flags += ["--host", options.host, "--port", str(options.port), "--lifeline", "0"]
    flags += ["--member", msgspec.json.encode(member).decode()]
    flags += ["--tokenizer", options.tokenizer] if options.tokenizer else []
    flags += ["--client-endpoint", options.client_endpoint] if options.client_endpoint else []
    flags += ["--otlp-endpoint", options.otlp_endpoint] if options.otlp_endpoint else []
    flags += ["--own-socket"] if options.own_socket else []
    flags += ["--log-format", options.log_format, "--log-level", options.log_level, *as_flags(options)]
    return [sys.executable, "-m", "splash_trt.frontend.main", *flags]
