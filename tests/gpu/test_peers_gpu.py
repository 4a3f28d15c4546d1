"""Peers over mapped memory, one GPU per rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.mpi import gpu_peer_cases
from tests.mpi.peer_cases import CASES
from tests.mpi.world import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture(params=[1, 2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def test_all_cases(ranks: Ranks) -> None:
    for dtype in ("bfloat16", "float32", "float64"):
        assert ranks.run(gpu_peer_cases.run_all, dtype, timeout_s=240) == [len(CASES)] * ranks.size


def test_captured_steps_among_other_calls(ranks: Ranks) -> None:
    assert ranks.run(gpu_peer_cases.run_replays, 1000, timeout_s=240) == [0] * ranks.size
