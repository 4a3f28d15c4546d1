"""A rank's means of working with the other ranks (World), and worlds whose ranks are threads.

    ranks of a world of 4:   0 (schedules, and executes)   1   2   3 (execute)

Collectives are always over all ranks, in this order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from splash_trt.dist.baton import Baton
from splash_trt.dist.board import Board, Watch
from splash_trt.dist.collectives import Collectives
from splash_trt.dist.collectives_threads import Meeting, ThreadCollectives
from splash_trt.dist.control import Control
from splash_trt.dist.control_threads import Mailboxes, ThreadControl

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """One rank's view of its world. A program that gets it need not know whether ranks are threads or MPI processes."""

    rank: int
    size: int
    collectives: Collectives
    control: Control
    watch: Watch
    device: torch.device = CPU
    """What this rank computes on. If it is a GPU, the collectives take tensors on it."""
    ranks_on_device: int = 1
    """How many ranks share a GPU, at the most, over all GPUs; the same number on every rank."""


@dataclass
class Outcome(Generic[T]):
    """How a rank's program ended."""

    result: T | None = None
    error: BaseException | None = None


class ThreadWorld:
    """`size` ranks as threads of this process, of which one runs at a time (see baton.py). Runs one program.

    Use either `run`, in which every rank is a new thread, or `start`, in which the calling thread is rank 0. A rank
    that raises ends the world: every other rank's present or next wait raises RankFailure naming it. A wait of
    `deadline_s` for a rank that does not come ends it in the same way. Only a world of one rank may have a GPU: threads
    take turns, while ranks on GPUs run at the same time.
    """

    def __init__(self, size: int, deadline_s: float = 60.0, device: torch.device = CPU) -> None:
        if size < 1:
            raise ValueError(f"size: {size} is not a positive number of ranks")
        assert size == 1 or device.type == "cpu", (size, device)
        self.size = size
        self.board = Board.local(size)
        self._baton = Baton(size, deadline_s)
        meeting, boxes = Meeting(size), Mailboxes(size)
        self.ranks: list[World] = []
        for rank in range(size):
            watch = Watch(self.board, rank)
            collectives = ThreadCollectives(rank, meeting, self._baton, watch)
            control = ThreadControl(rank, boxes, self._baton, watch)
            self.ranks.append(World(rank, size, collectives, control, watch, device))
        self._threads: list[threading.Thread] = []
        self._failed: list[tuple[int, BaseException]] = []

    def run(self, program: Callable[[World], T]) -> list[T]:
        """Runs `program` on every rank and returns the results in rank order. Raises the first error if ranks raise."""
        outcomes = self.outcomes(program)
        for outcome in outcomes:
            if outcome.error is not None:
                raise self._failed[0][1]
        return [outcome.result for outcome in outcomes]  # type: ignore[misc]

    def outcomes(self, program: Callable[[World], T]) -> list[Outcome[T]]:
        """Like `run`, but returns each rank's result or error."""
        outcomes: list[Outcome[T]] = [Outcome() for _ in range(self.size)]
        self._start(program, range(self.size), outcomes)
        for thread in self._threads:
            thread.join()
        return outcomes

    def start(self, program: Callable[[World], object]) -> World:
        """Starts `program` on all ranks but 0 and returns rank 0's view, for the calling thread to use.

        The others run while rank 0 waits in a collective or its control channel.
        """
        self._start(program, range(1, self.size), [Outcome() for _ in range(self.size)])
        return self.ranks[0]

    def join(self) -> None:
        """After `start` and a STOP: waits for the others to end. Raises what ended the world, if anything did."""
        self._baton.finish(0)
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0][1]

    def _start(self, program: Callable[[World], T], ranks: Sequence[int], outcomes: list[Outcome[T]]) -> None:
        assert not self._threads, "a ThreadWorld runs one program"
        for rank in ranks:
            arguments = (program, self.ranks[rank], outcomes[rank])
            # Daemons: a rank that never returns must not keep a failed test's process alive.
            self._threads.append(threading.Thread(target=self._rank, args=arguments, name=f"rank{rank}", daemon=True))
        for thread in self._threads:
            thread.start()

    def _rank(self, program: Callable[[World], T], world: World, outcome: Outcome[T]) -> None:
        try:
            self._baton.begin(world.rank)
            outcome.result = program(world)
        except BaseException as error:
            outcome.error = error
            world.watch.failed()
            self._failed.append((world.rank, error))
            self._baton.abort(world.rank, error)
        else:
            self._baton.finish(world.rank)
