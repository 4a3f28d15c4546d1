"""The collectives between threads: results at several world sizes, and what happens when ranks fail or disagree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from splash_trt.dist.collectives import Collectives, RankFailure
from splash_trt.dist.collectives_threads import ThreadCollectives
from splash_trt.dist.world import ThreadWorld, World
from tests.mpi import collective_cases
from tests.mpi.collective_cases import CASES, CPU


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
class TestAllSizes:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_case(self, size: int, case: Callable[[Collectives, torch.device], None]) -> None:
        ThreadWorld(size).run(lambda world: case(world.collectives, CPU))

    def test_bytes_sent(self, size: int) -> None:
        def program(world: World) -> None:
            assert isinstance(world.collectives, ThreadCollectives)
            collective_cases.check_bytes_sent(world.collectives, world.collectives.bytes_sent, CPU)

        ThreadWorld(size).run(program)

    def test_results_come_in_rank_order(self, size: int) -> None:
        assert ThreadWorld(size).run(lambda world: (world.rank, world.size)) == [(r, size) for r in range(size)]

    def test_one_rank_runs_at_a_time_and_always_in_the_same_order(self, size: int) -> None:
        def order() -> list[int]:
            entered: list[int] = []
            inside: list[int] = []

            def program(world: World) -> None:
                for _ in range(5):
                    inside.append(world.rank)
                    time.sleep(0.001)
                    assert inside == [world.rank], "two ranks ran at once"
                    inside.clear()
                    entered.append(world.rank)
                    world.collectives.all_reduce(torch.ones(2))

            ThreadWorld(size).run(program)
            return entered

        first = order()
        assert len(first) == 5 * size
        assert order() == first


def failing(rank: int, error: Exception) -> Callable[[World], None]:
    def program(world: World) -> None:
        world.collectives.all_reduce(torch.ones(2))
        if world.rank == rank:
            raise error
        world.collectives.all_reduce(torch.ones(2))

    return program


class TestFailures:
    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_a_rank_that_raises_ends_all_and_is_named(self, rank: int) -> None:
        outcomes = ThreadWorld(4).outcomes(failing(rank, KeyError("planted")))
        assert isinstance(outcomes[rank].error, KeyError)
        for other in {0, 1, 2, 3} - {rank}:
            error = outcomes[other].error
            assert isinstance(error, RankFailure)
            assert error.rank == rank
            assert f"rank {rank} failed: KeyError: 'planted'" in str(error)

    def test_run_raises_the_cause(self) -> None:
        with pytest.raises(KeyError, match="planted"):
            ThreadWorld(3).run(failing(2, KeyError("planted")))

    def test_a_rank_that_fails_last_reaches_the_running_rank_at_its_next_call(self) -> None:
        def program(world: World) -> None:
            if world.rank == 1:
                raise ValueError("early")
            world.collectives.all_gather(torch.ones(1), [1, 1])

        outcomes = ThreadWorld(2).outcomes(program)
        assert isinstance(outcomes[0].error, RankFailure) and outcomes[0].error.rank == 1

    def test_a_wait_beyond_the_deadline_names_the_ranks_that_have_not_arrived(self) -> None:
        release = threading.Event()

        def program(world: World) -> None:
            if world.rank == 2:
                release.wait(20)
            world.collectives.all_gather(torch.ones(1), [1, 1, 1])

        world = ThreadWorld(3, deadline_s=0.3)
        begin = time.monotonic()
        threading.Timer(1.0, release.set).start()
        outcomes = world.outcomes(program)
        assert time.monotonic() - begin < 5
        for rank in (0, 1):
            error = outcomes[rank].error
            assert isinstance(error, RankFailure) and error.rank == 2
            assert "all_gather" in str(error) and "rank 2 (running)" in str(error) and "0.3 s" in str(error)
        assert isinstance(outcomes[2].error, RankFailure)  # it comes too late: the world has ended

    def test_many_busy_ranks_in_turn_do_not_count_as_one_long_wait(self) -> None:
        def program(world: World) -> None:
            time.sleep(0.15)
            world.collectives.all_reduce(torch.ones(1))

        ThreadWorld(8, deadline_s=0.9).run(program)

    def test_a_rank_that_has_ended_is_named_at_once(self) -> None:
        def program(world: World) -> None:
            if world.rank == 0:
                world.collectives.all_reduce(torch.ones(1))

        begin = time.monotonic()
        with pytest.raises(RankFailure, match=r"waited for rank 1 \(ended\)") as caught:
            ThreadWorld(2, deadline_s=30).run(program)
        assert caught.value.rank == 1
        assert time.monotonic() - begin < 5


def call(name: str) -> Callable[[Collectives], object]:
    calls: dict[str, Callable[[Collectives], object]] = {
        "all_reduce": lambda c: c.all_reduce(torch.ones(2)),
        "all_reduce of 3": lambda c: c.all_reduce(torch.ones(3)),
        "all_reduce in float64": lambda c: c.all_reduce(torch.ones(2, dtype=torch.float64)),
        "all_gather 1 1": lambda c: c.all_gather(torch.ones(1), [1, 1]),
        "all_gather 1 2": lambda c: c.all_gather(torch.ones([1, 2][c.rank]), [1, 2]),
        "all_gather 1 1 wide": lambda c: c.all_gather(torch.ones(1, 4), [1, 1]),
        "reduce_scatter 1 1": lambda c: c.reduce_scatter(torch.ones(2), [1, 1]),
        "reduce_scatter 2 0": lambda c: c.reduce_scatter(torch.ones(2), [2, 0]),
        "all_to_all of 1": lambda c: c.all_to_all([torch.ones(1), torch.ones(1)], [(1,), (1,)]),
        "all_to_all of 2": lambda c: c.all_to_all([torch.ones(2), torch.ones(2)], [(2,), (2,)]),
    }
    return calls[name]


class TestRanksOutOfStep:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("all_reduce", "all_gather 1 1"),
            ("all_gather 1 1", "reduce_scatter 1 1"),
            ("all_to_all of 1", "all_reduce"),
            ("all_reduce", "all_reduce of 3"),
            ("all_reduce", "all_reduce in float64"),
            ("all_gather 1 1", "all_gather 1 2"),
            ("all_gather 1 1", "all_gather 1 1 wide"),
            ("reduce_scatter 1 1", "reduce_scatter 2 0"),
            ("all_to_all of 1", "all_to_all of 2"),
        ],
    )
    def test_both_calls_are_named_at_once(self, first: str, second: str) -> None:
        begin = time.monotonic()
        outcomes = ThreadWorld(2, deadline_s=30).outcomes(
            lambda world: call(first if world.rank == 0 else second)(world.collectives)
        )
        assert time.monotonic() - begin < 5
        for outcome in outcomes:
            assert isinstance(outcome.error, RankFailure)
            for word in ("rank 0", "rank 1", first.split()[0], second.split()[0], "out of step"):
                assert word in str(outcome.error)

    def test_counts_that_contradict_the_own_input_are_a_bug(self) -> None:
        with pytest.raises(AssertionError):
            ThreadWorld(2).run(lambda world: world.collectives.all_gather(torch.ones(3), [1, 1]))
        with pytest.raises(AssertionError):
            ThreadWorld(2).run(lambda world: world.collectives.reduce_scatter(torch.ones(3), [1, 1]))
