"""A `splash-trt serve` as benchmarks use it: requests to one that is running, and one that a benchmark starts."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from perf import harness
from splash_trt import environment

START_S = 1200.0  # time for weights of tens of gigabytes, kernels to compile and graphs to capture
SWITCH_S = 120.0
METRICS_S = 10.0
END_S = 60.0
ASK_S = 120.0
FRONTENDS_S = 2.5  # within this time each frontend has told the others its numbers
MODEL_NAME = "model"


class Server:
    """A server on this host that is ready."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Sends a request; returns the answer's status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, data = self.ask("GET", path)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def go_to(self, layout: str) -> None:
        """Has the server serve in this layout (pinned), or in mode "auto", and waits until it does."""
        body = {"layout": layout} if layout == "auto" else {"layout": layout, "pin": True}
        status, data = self.ask("POST", "/v1/layout", body)
        assert status == 200, data
        _wait_until(lambda: self._serves(layout), SWITCH_S, f"the server does not get to {layout}")

    def output_tokens(self, at_least: int) -> int:
        """How many output tokens the server says that it has sent to clients since its start.

        Several frontends tell each other their numbers only now and then. So if it says fewer than at_least, it is
        asked again for a while.
        """
        end = time.monotonic() + METRICS_S
        while True:
            _, data = self.ask("GET", "/metrics")
            lines = [line for line in data.decode().splitlines() if line.startswith("splash_output_tokens_total")]
            told = round(sum(float(line.split()[-1]) for line in lines))
            if told >= at_least or time.monotonic() > end:
                return told
            time.sleep(0.2)

    def settled_output_tokens(self) -> int:
        """The same for a server that may have served before: waits until all frontends have told each other everything.
        """
        told, before = self.output_tokens(at_least=0), -1
        while told != before:
            time.sleep(FRONTENDS_S)
            told, before = self.output_tokens(at_least=0), told
        return told

    def cache_tokens(self, layout: str) -> int | None:
        """How many tokens the layout's cache holds, over all ranks; None for "auto"."""
        room = self.get("/v1/layout")["capacity"].get(layout)
        return None if room is None else int(room["tokens_total"])

    def wait_until_idle(self) -> None:
        _wait_until(self._idle, SWITCH_S, "requests are left")

    def _serves(self, layout: str) -> bool:
        answer = self.get("/v1/layout")
        if layout == "auto":
            return bool(answer["mode"] == "auto")
        return bool(answer["status"]["layout"] == layout and answer["status"]["switch"] == "steady")

    def _idle(self) -> bool:
        status = self.get("/v1/layout")["status"]
        return bool(status["running"] == status["waiting"] == 0 and status["switch"] == "steady")


class Started(Server):
    """A server that is started with these flags of `splash-trt serve`, and waited for; as a context manager it ends."""

    def __init__(self, flags: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            super().__init__(probe.getsockname()[1])
        command = [sys.executable, "-m", "splash_trt", "serve", *flags, "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--name", MODEL_NAME],
            cwd=harness.ROOT,
            env=environment.for_child() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_until(self._ready, START_S, "the server is not ready")
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def wait_until_ended(self) -> None:
        """Waits until the server's process ends, which it should not do by itself."""
        self._process.wait()

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with {self._process.returncode}")
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def _kill(self) -> None:
        """Kills the supervisor's process group; ranks end with it by their lifelines."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _wait_until(what: Callable[[], bool], seconds: float, why: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"{why} within {seconds:g} s")
        time.sleep(0.05)
