"""Frontends as real processes, and the plainest HTTP client to look at what they say."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0
JSON = {"Content-Type": "application/json"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Of a stream, without the [DONE] at its end."""
        lines = [line[6:] for line in self.data.decode().split("\n\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass
class FrontendProcess:
    process: subprocess.Popen[str]
    port: int
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """body: bytes as they are, anything else as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, data, {**JSON, **headers} if data is not None else headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def wait_for_exit(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def start_frontend(address: str, *flags: str, pass_fds: tuple[int, ...] = ()) -> FrontendProcess:
    """On a free port; returns when it listens."""
    command = [sys.executable, "-m", "splash_trt.frontend.main", "--engine", address, "--model-name", "echo"]
    process = subprocess.Popen(
        [*command, "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True, pass_fds=pass_fds
    )
    frontend = FrontendProcess(process, 0)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            frontend.log.append(line)
            found = re.search(r"port (\d+) is open", line)
            if found:
                frontend.port = int(found[1])
                listening.set()

    threading.Thread(target=read, daemon=True).start()
    assert listening.wait(START_S), frontend.log
    return frontend


def wait_until(what: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.01)


def wait_until_ready(frontend: FrontendProcess) -> FrontendProcess:
    wait_until(lambda: frontend.ask("GET", "/readyz").status == 200)
    return frontend
