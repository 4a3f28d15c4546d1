"""Real serving runs, in both modes: `mpirun -n N splash-trt serve` and `splash-trt serve --ranks N`."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from splash_trt import environment
from splash_trt.launch import mpirun_command

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "splash-tiny"
SHARED = "/dev/shm/"
START_S = 180.0  # a crowded machine imports torch slowly
MODES = ("mpirun", "supervised")
SPLASH = [sys.executable, "-m", "splash_trt"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command(mode: str, num_ranks: int, flags: Sequence[str]) -> list[str]:
    if mode == "supervised":
        return [*SPLASH, "serve", "--ranks", str(num_ranks), *flags]
    return mpirun_command(num_ranks, [*SPLASH, "serve", *flags])


def run_to_end(argv: Sequence[str], folder: Path, timeout_s: float = START_S) -> tuple[int, str]:
    """Exit code and stderr of a run that ends by itself, with `folder` for its temporary files."""
    env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(
        argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    return done.returncode, done.stderr


def wait_until(what: Callable[[], Any], seconds: float = 60.0, why: str = "what was waited for") -> Any:
    """what()'s first true value."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {why}"
        time.sleep(0.02)
    return value


@dataclass
class Reply:
    status: int
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Run:
    """A command with a folder of its own for temporary files, so that what it leaves there is its own."""

    def __init__(self, argv: Sequence[str]) -> None:
        # Not below pytest's own folder, whose path can be too long for a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="splash-e2e-"))
        self._log = self.folder.with_suffix(".log")
        env = environment.for_mpirun() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a process group of its own, as a shell makes for each of its jobs
            )
        self._seen: list[psutil.Process] = []
        self._shared: set[str] = set()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def look(self) -> None:
        """Remember every process of the run and the shared memory that they have mapped."""
        top = psutil.Process(self.process.pid)
        self._seen = [top, *top.children(recursive=True)]
        for process in self._seen:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            paths = {line.split()[-1] for line in maps if SHARED in line and not line.endswith("(deleted)")}
            self._shared |= {path for path in paths if os.path.exists(path)}

    def alive(self) -> list[psutil.Process]:
        """Processes that were seen and have not ended; a zombie has, whoever has yet to ask for its exit code."""
        self.process.poll()
        return [p for p in self._seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def leftovers(self) -> list[str]:
        """Files that the run should have removed."""
        return [str(path) for path in self.folder.rglob("*")] + [path for path in self._shared if os.path.exists(path)]

    def close(self) -> None:
        """End what is left, and remove the folder."""
        for process in self.alive():
            process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._shared:
            Path(path).unlink(missing_ok=True)
        self._log.unlink()


class Server(Run):
    """A serving run."""

    def __init__(self, mode: str, num_ranks: int, flags: Sequence[str]) -> None:
        self.mode = mode
        self.port = free_port()
        super().__init__(command(mode, num_ranks, [*flags, "--port", str(self.port)]))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> Reply:
        """body: bytes as they are, anything else as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, data, {} if data is None else {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Reply(response.status, response.read())
        finally:
            connection.close()

    def wait_until_ready(self) -> Server:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            try:
                return self.ask("GET", "/readyz", timeout_s=5).status == 200
            except OSError:
                return False

        wait_until(ready, START_S, "ready")
        self.look()
        return self

    def find(self, kind: str) -> psutil.Process:
        """kind: mpirun, supervisor, frontend, rank0, rank1 and so on."""
        return next(process for process in self._seen if self._kind(process) == kind)

    def _kind(self, process: psutil.Process) -> str:
        command_line = " ".join(process.cmdline())
        if "splash_trt.frontend.main" in command_line:
            return "frontend"
        rank = process.environ().get("OMPI_COMM_WORLD_RANK")
        if rank is not None:
            return f"rank{rank}"
        return "supervisor" if process.pid == self.process.pid and self.mode == "supervised" else "mpirun"


class StreamReader(threading.Thread):
    """Reads one streamed completion, event by event, until it ends or breaks."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._body = {"stream": True, "return_token_ids": True, "ignore_eos": True, **body}
        self.tokens: list[int] = []
        self.error: dict[str, Any] | None = None
        self.done = False
        self.broken: str | None = None
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body))
            for line in connection.getresponse():
                self._take(line.decode().strip())
        except (OSError, http.client.HTTPException) as error:
            self.broken = repr(error)
        finally:
            connection.close()

    def _take(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if not data or data.startswith(":"):  # a comment
            return
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
        else:
            self.tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
