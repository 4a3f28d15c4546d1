"""The real tritonserver as a process, and the plainest client of its generate extension."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.e2e.servers import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "triton_server.sh"
START_S = 120.0
END_S = 40.0


class TritonServer:
    """One run of scripts/triton_server.sh. flags: further ones of tritonserver."""

    def __init__(self, repository: Path, *flags: str) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        ports = {"http": self.http_port, "grpc": self.grpc_port, "metrics": free_port()}
        self._log = tempfile.NamedTemporaryFile(prefix="triton-", suffix=".log")
        self._process = subprocess.Popen(
            ["bash", str(SCRIPT), str(repository), *(f"--{name}-port={port}" for name, port in ports.items()), *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait_until_ready(self) -> TritonServer:
        def ready() -> bool:
            assert self._process.poll() is None, self.log
            try:
                return self.ask("GET", "/v2/health/ready")[0] == 200
            except OSError:
                return False

        wait_until(ready, START_S, "Triton's being ready")
        return self

    def ask(self, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def generate(self, model: str = "splash", **fields: Any) -> tuple[int, dict[str, Any]]:
        """POST …/generate: the status and the one answer."""
        status, data = self.ask("POST", f"/v2/models/{model}/generate", fields)
        return status, json.loads(data)

    def generate_stream(self, model: str = "splash", **fields: Any) -> Iterator[dict[str, Any]]:
        """POST …/generate_stream: each event as it comes. Leaving it early closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        try:
            connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(fields))
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def stub(self) -> psutil.Process:
        """The process that runs model.py."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return next(child for child in children if "triton_python_backend_stub" in child.name())

    def stop(self) -> int:
        """In order, as an orchestrator would; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(END_S)

    def close(self) -> None:
        """End what is left, and remove the shared memory that Triton leaves behind when it is killed."""
        regions: set[str] = set()
        if self._process.poll() is None:
            maps = Path(f"/proc/{self._process.pid}/maps").read_text().splitlines()
            regions = {line.split()[5] for line in maps if "/dev/shm/triton_python_backend" in line}
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
            self._process.kill()
        self._process.wait()
        for region in regions:
            Path(region).unlink(missing_ok=True)
        self._log.close()
