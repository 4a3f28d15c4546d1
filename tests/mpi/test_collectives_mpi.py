"""The collectives over MPI, in the same cases as between threads."""

from __future__ import annotations

import pytest
import torch

from splash_trt.dist.board import Phase
from splash_trt.dist.exchange import ExchangeCollectives
from splash_trt.dist.world import World
from tests.mpi import collective_cases
from tests.mpi.collective_cases import CASES, CPU
from tests.mpi.world import Ranks

pytestmark = pytest.mark.mpi

NAMES = [case.__name__ for case in CASES]


def run_case(world: World, name: str) -> None:
    getattr(collective_cases, name)(world.collectives, CPU)


def count_bytes(world: World) -> None:
    assert isinstance(world.collectives, ExchangeCollectives)
    collective_cases.check_bytes_sent(world.collectives, world.collectives.bytes_sent, CPU)


def run_staged(world: World) -> int:
    """Every case through copies, as between ranks that share a GPU; how many there were."""
    from mpi4py import MPI  # importing it at the top would make a rank of the test process

    from splash_trt.dist.collectives_staged import StagedCollectives

    collectives = StagedCollectives(MPI.COMM_WORLD, world.watch, CPU)
    for case in CASES:
        case(collectives, CPU)
    collective_cases.check_bytes_sent(collectives, collectives.bytes_sent, CPU)
    collectives.close()
    return len(CASES)


def count_copies(world: World) -> int:
    """How often a rank copies what it gathers with three others."""
    from mpi4py import MPI

    from splash_trt.dist.collectives_staged import StagedCollectives

    collectives, copied, real = StagedCollectives(MPI.COMM_WORLD, world.watch, CPU), [], torch.Tensor.cpu
    torch.Tensor.cpu = lambda x: copied.append(x) or real(x)  # type: ignore[method-assign, assignment, func-returns-value, misc]
    try:
        collectives.all_gather(torch.ones(2), [2] * world.size)
    finally:
        torch.Tensor.cpu = real  # type: ignore[method-assign]
        collectives.close()
    return len(copied)


def refuse_large(world: World) -> str:
    """The message for more elements than MPI can count; they are never made."""
    too_many = torch.empty(1, dtype=torch.int8).expand(2**31)
    assert isinstance(world.collectives, ExchangeCollectives)
    try:
        world.collectives._exchange([too_many] * world.size, [too_many] * world.size)
    except ValueError as error:
        return str(error)
    return ""


def read_board(world: World) -> list[list[int]]:
    """[rank, pid, collectives, phase] of all ranks, once they are equally far."""
    world.collectives.all_reduce(torch.ones(1))
    return [[row.rank, row.pid, row.counter, row.phase] for row in world.watch.board.read()]


class TestCollectives:
    @pytest.mark.parametrize("name", NAMES)
    def test_case_on_2(self, mpi2: Ranks, name: str) -> None:
        mpi2.run(run_case, name)

    @pytest.mark.parametrize("name", NAMES)
    def test_case_on_4(self, mpi4: Ranks, name: str) -> None:
        mpi4.run(run_case, name)

    def test_bytes_sent(self, mpi2: Ranks, mpi4: Ranks) -> None:
        mpi2.run(count_bytes)
        mpi4.run(count_bytes)


def test_all_cases_through_copies(mpi4: Ranks) -> None:
    assert mpi4.run(run_staged) == [len(CASES)] * 4
    assert mpi4.run(count_copies) == [1] * 4


def test_more_elements_than_mpi_counts_are_refused_clearly(mpi2: Ranks) -> None:
    for message in mpi2.run(refuse_large):
        assert "2147483648 elements" in message and "2147483647" in message and "max_batch_tokens" in message


def test_every_rank_sees_all_on_the_board(mpi4: Ranks) -> None:
    boards = mpi4.run(read_board)
    for board in boards:
        assert [row[0] for row in board] == [0, 1, 2, 3]
        assert [row[1] for row in board] == [row[1] for row in boards[0]], "ranks see different boards"
        assert len({row[1] for row in board}) == 4
        # Another rank may not have left the collective yet.
        assert {row[3] for row in board} <= {Phase.COMPUTING, Phase.ALL_REDUCE, Phase.IDLE}
    for rank, board in enumerate(boards):
        assert board[rank][3] == Phase.COMPUTING
        assert board[rank][2] > 0
