from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splash_engines.build import build_engine
from tests.e2e.servers import MODEL, Server

SIZES = ("--memory", "256M", "--page-tokens", "16", "--max-batch-tokens", "512", "--max-running", "128")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "splash-tiny"
    build_engine(MODEL, folder)
    return folder


@pytest.fixture(scope="session")
def server(engine: Path) -> Iterator[Server]:
    """Two ranks under mpirun, in float64, so that answers do not depend on the layout."""
    flags = ["--engine", str(engine), "--dtype", "float64", "--trace", str(engine.parent / "trace.json"), *SIZES]
    server = Server("mpirun", 2, flags)
    try:
        yield server.wait_until_ready()
    finally:
        server.close()
