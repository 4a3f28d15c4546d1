"""The collectives over torch.distributed, in the same cases as the others, with the backend that needs no GPU."""

from __future__ import annotations

import pytest

from tests.mpi import nccl_cases
from tests.mpi.collective_cases import CASES
from tests.mpi.world import Ranks

pytestmark = pytest.mark.mpi


def test_all_cases(mpi2: Ranks, mpi4: Ranks) -> None:
    for ranks in (mpi2, mpi4):
        assert ranks.run(nccl_cases.run_all, "gloo", timeout_s=120) == [len(CASES)] * ranks.size
