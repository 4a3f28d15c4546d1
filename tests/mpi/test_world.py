"""The harness itself: results in rank order, failures with their traceback, a new world after one."""

from __future__ import annotations

import time

import pytest
import torch

from splash_trt.dist.world import World
from tests.mpi.world import Ranks

pytestmark = pytest.mark.mpi


def total_of_ranks(world: World, scale: float) -> list[float]:
    total = world.collectives.all_reduce(torch.tensor([world.rank * scale]))
    return [world.rank, float(total)]


def test_results_come_in_rank_order(mpi4: Ranks) -> None:
    assert mpi4.run(total_of_ranks, 2.0) == [[rank, 12.0] for rank in range(4)]


def fails_on_one_rank(world: World) -> None:
    if world.rank == 1:
        raise ValueError("planted on rank 1")
    world.collectives.all_reduce(torch.ones(1 << 20))


@pytest.mark.nightly
def test_a_failing_case_is_reported_and_the_next_runs_in_a_new_world(mpi2: Ranks) -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="planted on rank 1"):
        mpi2.run(fails_on_one_rank)
    assert time.monotonic() - begin < 40
    assert mpi2.run(total_of_ranks, 1.0) == [[0, 1.0], [1, 1.0]]
