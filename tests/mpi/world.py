"""A world of MPI ranks that lives as long as the test session and runs one case after another.

Starting ranks costs seconds (each imports torch), a case milliseconds. A case is a function at the top of a module that
the ranks can import, whose first argument is the rank's World; a test hands it to `Ranks.run` through a fixture of
conftest.py (`mpi2`, `mpi4`), which starts its world when it is first used:

    from splash_trt.dist.world import World
    from tests.mpi.world import Ranks

    def total_of_ranks(world: World, scale: float) -> float:
        return float(world.collectives.all_reduce(torch.tensor([world.rank * scale])))

    @pytest.mark.mpi
    def test_total(mpi4: Ranks) -> None:
        assert mpi4.run(total_of_ranks, 2.0) == [12.0] * 4

Arguments and results are what msgpack can carry; results come as a list in rank order. A case that raises on any rank
fails the test with the tracebacks of all ranks that raised; the world is then started anew for the next case, since
ranks may be out of step. Tests that need ranks live under tests/mpi, so that all of them share the two worlds.

A case's module must not import mpi4py.MPI at its top, not even through others: that would make a rank of the test
process (and leave files in /dev/shm).

Ranks run this file as a program. Each talks to the test process over a Unix socket of its own, so that a rank that is
stuck in MPI keeps nobody from hearing the others.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from splash_trt import environment
from splash_trt.dist.world import World
from splash_trt.launch import mpirun_command, run_under_mpi

ROOT = Path(__file__).resolve().parents[2]
STARTUP_S = 120.0  # four ranks that import torch on two busy cores
STRAGGLERS_S = 5.0  # once a rank has raised, the others end or hang


class Ranks:
    """`size` ranks under one mpirun, started at the first `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._links: list[Link] = []
        self._pids: list[int] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """case(world, *args) on every rank; the results in rank order."""
        if self._mpirun is None:
            self._start()
        request = {"module": _module(case), "name": case.__qualname__, "args": args}
        end = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        try:
            for link in self._links:
                link.send(request)
            while len(answers) < self.size and time.monotonic() < end:
                for rank, link in enumerate(self._links):
                    if rank not in answers and (answer := link.receive(0.01)) is not None:
                        answers[rank] = answer
                        if answer["error"]:
                            end = min(end, time.monotonic() + STRAGGLERS_S)
        except EOFError:
            pass  # a rank has died; what it said is in the log
        if len(answers) == self.size and not any(answer["error"] for answer in answers.values()):
            return [answers[rank]["result"] for rank in range(self.size)]
        self.kill()
        raise AssertionError(self._report(case, answers, timeout_s))

    def close(self) -> None:
        """Ends the ranks in good order; raises AssertionError if they do not end well within a minute."""
        if self._mpirun is not None:
            for link in self._links:
                link.send({"module": ""})
            try:
                code = self._mpirun.wait(60)
            except subprocess.TimeoutExpired:
                code = -1
            self.kill()
            assert code == 0, f"the world of {self.size} ended with {code}\n{self._log()}"
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends the ranks at once; the next `run` starts new ones."""
        if self._mpirun is None:
            return
        self._mpirun.terminate()
        try:
            self._mpirun.wait(5)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
            self._mpirun.wait()
        for pid in self._pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        for link in self._links:
            link.close()
        self._mpirun = None

    def _start(self) -> None:
        assert "mpi4py.MPI" not in sys.modules, "a test module has initialised MPI in the test process"
        path = str(Path(self._folder.name) / "socket")
        Path(path).unlink(missing_ok=True)
        command = mpirun_command(self.size, [sys.executable, "-m", "tests.mpi.world", path])
        with socket.socket(socket.AF_UNIX) as server, open(self._log_path, "wb") as log:
            server.bind(path)
            server.listen(self.size)
            server.settimeout(STARTUP_S)
            self._mpirun = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment.for_mpirun() | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            links: dict[int, tuple[Link, int]] = {}
            try:
                for _ in range(self.size):
                    link = Link(server.accept()[0])
                    hello = link.receive(STARTUP_S)
                    assert hello is not None
                    links[hello["rank"]] = (link, hello["pid"])
            except (TimeoutError, EOFError):
                self.kill()
                raise AssertionError(f"the world of {self.size} did not start\n{self._log()}") from None
        self._links = [links[rank][0] for rank in range(self.size)]
        self._pids = [links[rank][1] for rank in range(self.size)]

    @property
    def _log_path(self) -> Path:
        return Path(self._folder.name) / "log"

    def _log(self) -> str:
        return "--- output of the ranks\n" + self._log_path.read_text(errors="replace")[-8000:]

    def _report(self, case: Callable[..., Any], answers: dict[int, dict[str, Any]], timeout_s: float) -> str:
        lines = [f"{case.__qualname__} on {self.size} ranks:"]
        for rank in range(self.size):
            if rank not in answers:
                lines.append(f"rank {rank}: no answer (time limit {timeout_s:g} s)")
            elif answers[rank]["error"]:
                lines.append(f"rank {rank}: {answers[rank]['error']}")
        return "\n".join([*lines, self._log()])


def _module(case: Callable[..., Any]) -> str:
    """The module's name for the ranks, which run in ROOT; pytest may have given it another."""
    path = Path(case.__code__.co_filename).resolve().relative_to(ROOT)
    return ".".join(path.with_suffix("").parts)


class Link:
    """Messages over a socket: a length of 4 bytes, then msgpack."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        data = msgspec.msgpack.encode(message)
        try:
            self._sock.sendall(len(data).to_bytes(4, "little") + data)
        except BrokenPipeError:
            raise EOFError from None

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message, or None if it has not come in time; EOFError when the other side is gone."""
        self._sock.settimeout(timeout_s)
        try:
            while len(self._received) < 4 or len(self._received) < 4 + self._length():
                data = self._sock.recv(1 << 20)
                if not data:
                    raise EOFError
                self._received += data
        except TimeoutError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        data, self._received = self._received[4 : 4 + self._length()], self._received[4 + self._length() :]
        return msgspec.msgpack.decode(data)

    def close(self) -> None:
        self._sock.close()

    def _length(self) -> int:
        return int.from_bytes(self._received[:4], "little")


def serve_cases(world: World, link: Link) -> int:
    """A rank's program: runs the cases that come, until the one without a name or the end of the test process."""
    world.watch.end_step()
    link.send({"rank": world.rank, "pid": os.getpid()})
    number = 0
    while (request := _next(link)) is not None and request["module"]:
        world.watch.begin_step(number)
        answer: dict[str, Any] = {"result": None, "error": ""}
        try:
            case = getattr(importlib.import_module(request["module"]), request["name"])
            answer["result"] = case(world, *request["args"])
        except Exception:
            answer["error"] = traceback.format_exc()
        world.watch.end_step()
        link.send(answer)
        number += 1
    return 0


def _next(link: Link) -> dict[str, Any] | None:
    try:
        return link.receive(None)
    except EOFError:
        return None


def main() -> None:
    """The entry point of a rank."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    run_under_mpi(lambda world: serve_cases(world, Link(sock)), deadline_s=120.0)


if __name__ == "__main__":
    main()
