"""Fixtures of the tests that need tensorrt_rtx, which builds and describes networks without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.layouts.harness import Models


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
