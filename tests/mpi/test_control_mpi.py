"""The control channel over MPI; its deadlines, its start-up agreement, and how little a waiting rank uses its core."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.control import Kind
from splash_trt.dist.world import World
from tests.mpi import control_cases
from tests.mpi.world import Ranks

if TYPE_CHECKING:
    from splash_trt.dist.control_mpi import MpiControl

pytestmark = pytest.mark.mpi


def meet(world: World) -> None:
    world.collectives.all_reduce(torch.ones(1))


def new_control(world: World, deadline_s: float = 30.0) -> MpiControl:
    """A channel of its own, so that messages that a test leaves behind disturb no other."""
    from mpi4py import MPI  # importing it at the top would make a rank of the test process

    from splash_trt.dist.control_mpi import MpiControl

    return MpiControl(MPI.COMM_WORLD, world.watch, deadline_s, startup_deadline_s=deadline_s)


def agree_well(world: World) -> None:
    new_control(world).agree(None)


def agree_with_failure(world: World, failing: int, absent: int) -> list[object]:
    """[rank, text, seconds] of what `agree` raises, where `absent` calls it only after all others know."""
    control = new_control(world)
    begin = time.monotonic()
    if world.rank == absent:
        meet(world)
    try:
        control.agree("ValueError: planted" if world.rank == failing else None)
        result: list[object] = [-1, "", 0.0]
    except RankFailure as failure:
        result = [failure.rank, str(failure), time.monotonic() - begin]
    if world.rank != absent:
        meet(world)
    return result


def agree_too_late(world: World) -> str:
    """What rank 0 says if the last rank does not call `agree` within the deadline."""
    control = new_control(world, deadline_s=0.5)
    said = ""
    if world.rank < world.size - 1:
        try:
            control.agree(None)
        except RankFailure as failure:
            said = str(failure)
    meet(world)
    return said


def send_to_a_deaf_rank(world: World) -> str:
    """What rank 0 says if rank 1 takes no messages."""
    control = new_control(world, deadline_s=0.5)
    said = ""
    sent = 0
    if world.rank == 0:
        try:
            while sent < 50:
                sent += 1
                control.send(Kind.PLAN, b"x" * 10)
        except RankFailure as failure:
            said = str(failure)
    elif world.rank != 1:
        for _ in range(5):
            control.receive()
    meet(world)
    if world.rank == 1:
        for _ in range(5):
            assert control.receive().payload == b"x" * 10
    meet(world)
    control.progress()
    return said


WAIT_S = 3.0


def wait_for_rank_0(world: World, how: str) -> float:
    """Processor seconds that a rank uses while rank 0 lets it wait for WAIT_S."""
    meet(world)
    begin = time.process_time()
    if world.rank == 0:
        time.sleep(WAIT_S)
    if how == "all_reduce":
        meet(world)
    else:
        control_cases.broadcast(world, 1)
    return time.process_time() - begin


class TestMpiControl:
    def test_messages_arrive_in_order_on_all_ranks(self, mpi2: Ranks, mpi4: Ranks) -> None:
        for ranks in (mpi2, mpi4):
            for received in ranks.run(control_cases.send_and_receive)[1:]:
                assert received == control_cases.SENT

    def test_objects_arrive(self, mpi4: Ranks) -> None:
        value = {"outputs": [[1, 2, 3], []], "text": "ü", "long": "x" * 100_000}
        assert mpi4.run(control_cases.broadcast, value) == [value] * 4

    def test_agree_when_all_are_well(self, mpi2: Ranks, mpi4: Ranks) -> None:
        mpi2.run(agree_well)
        mpi4.run(agree_well)

    @pytest.mark.parametrize(("failing", "absent"), [(0, 3), (2, 1), (3, 0)])
    def test_agree_names_the_failing_rank_before_all_have_called(self, mpi4: Ranks, failing: int, absent: int) -> None:
        for rank, text, seconds in mpi4.run(agree_with_failure, failing, absent):
            assert rank == failing
            assert text == f"start-up failed on rank {failing}: ValueError: planted"
            assert seconds < 5

    def test_agree_names_a_rank_that_does_not_come(self, mpi4: Ranks) -> None:
        said = mpi4.run(agree_too_late)
        assert said[:3] == ["start-up: waited 0.5 s for rank 3"] * 3

    def test_a_rank_that_takes_no_messages_is_named(self, mpi4: Ranks) -> None:
        said = mpi4.run(send_to_a_deaf_rank)[0]
        assert "rank 1 took no message for 0.5 s" in said

    @pytest.mark.parametrize("how", ["all_reduce", "broadcast"])
    def test_a_waiting_rank_leaves_its_core_alone(self, mpi2: Ranks, how: str) -> None:
        # A rank that spins uses all of the wait; asleep it still looks around, and more so on a crowded machine.
        assert mpi2.run(wait_for_rank_0, how)[1] < WAIT_S / 2
