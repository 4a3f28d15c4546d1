"""Fixtures of the switching tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from splash_trt.request import Request
from tests.switching.harness import Told, make_requests, never_switched, write_model


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread for arithmetic: the model is tiny and the ranks take turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    return make_requests(45)


@pytest.fixture(scope="session")
def expected(folder: Path, requests: list[Request]) -> dict[str, Told]:
    """By request: what a run that never switches says."""
    return never_switched(folder, requests)
