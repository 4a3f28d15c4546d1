"""The collectives over NCCL, one GPU per rank, in the same cases as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.mpi import nccl_cases
from tests.mpi.collective_cases import CASES
from tests.mpi.world import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def test_all_cases(ranks: Ranks) -> None:
    assert ranks.run(nccl_cases.run_all, "nccl", timeout_s=120) == [len(CASES)] * ranks.size
