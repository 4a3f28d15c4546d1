from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from splash_trt.triton_backend.command import write_repository
from tests.frontend.conftest import tokenizer_folder as tokenizer_folder
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until_ready
from tests.triton.servers import SCRIPT, TritonServer


@pytest.fixture(scope="session")
def triton_installed() -> None:
    """Installs what is not there yet: 10 s where PyPI is near."""
    done = subprocess.run(["bash", str(SCRIPT), "--install-only"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@dataclass
class Stack:
    """An engine that echoes prompts, a frontend before it, and Triton before that."""

    engine: FakeEngine
    frontend: FrontendProcess
    triton: TritonServer


@pytest.fixture(scope="session")
def socket_folder() -> Iterator[Path]:
    # Not below pytest's own folder, whose path can be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="splash-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def stack(triton_installed: None, socket_folder: Path, tokenizer_folder: Path) -> Iterator[Stack]:
    """One for all tests that do it no harm. Model `batched` is for clients with a batch axis."""
    endpoint = f"ipc://{socket_folder}/clients"
    engine = FakeEngine(f"ipc://{socket_folder}/link", ready_message(400), step_s=0.002)
    engine.start()
    flags = ("--tokenizer", str(tokenizer_folder), "--keep-engine", "--client-endpoint", endpoint)
    frontend = start_frontend(f"ipc://{socket_folder}/link", *flags)
    repository = socket_folder / "repository"
    write_repository(repository, endpoint, "splash")
    write_repository(repository, endpoint, "batched", batched=True)
    triton = TritonServer(repository)
    try:
        wait_until_ready(frontend)
        yield Stack(engine, frontend, triton.wait_until_ready())
    finally:
        triton.close()
        frontend.end()
        engine.stop()
