"""Takes turns between ranks that are threads of one process: one of them runs at a time.

The running rank holds the baton. When it has to wait for another rank, it hands the baton to the next rank (in rank
order from its own) that can go on. So the order of events depends on the program alone, and ranks do not compete for
the interpreter lock. Rank 0 holds the baton at the start; its thread may be the one that made the Baton.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from splash_trt.dist.collectives import RankFailure


@dataclass(frozen=True)
class Wait:
    """What a rank that does not run waits for."""

    what: str
    """For messages, such as "all_gather (collective 17)"."""
    ready: Callable[[], bool]
    missing: Callable[[], list[int]]
    """The ranks that have not yet done what this rank waits for."""
    idle: bool = False
    """Whether the wait may take any time, as one for work does: no deadline."""


class Baton:
    """The baton of `size` ranks. If a rank waits and nobody has handed the baton over for `deadline_s`, the rank ends
    the world: every rank's present or next call raises RankFailure. Waits that are `idle` have no deadline."""

    def __init__(self, size: int, deadline_s: float) -> None:
        self._size = size
        self._deadline_s = deadline_s
        self._holder = 0
        self._handed_over = time.monotonic()
        self._waits: list[Wait | None] = [None] * size
        self._finished = [False] * size
        # An item in a rank's queue wakes it. Only the holder puts one there, or the rank that ends the world.
        self._gates: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(size)]
        self._failure: tuple[int, str, BaseException | None] | None = None

    def begin(self, rank: int) -> None:
        """Waits for the baton: the first call of each rank's thread, but not of one that made the Baton as rank 0."""
        while self._holder != rank:
            self._gates[rank].get()
            self.check()

    def wait(self, rank: int, wait: Wait) -> None:
        """Lets others run until wait.ready(). Raises RankFailure when the world has ended, or no rank can go on."""
        self.check()
        if wait.ready():
            return
        self._waits[rank] = wait
        self._hand_over(rank)
        self.check()
        while self._holder != rank:
            try:
                self._gates[rank].get(timeout=None if wait.idle else self._time_left())
            except queue.Empty:
                if self._time_left() <= 0 and self._holder != rank:
                    self._give_up(wait, f"for {self._deadline_s:g} s")
            self.check()
        self._waits[rank] = None

    def finish(self, rank: int) -> None:
        """The rank's program has ended: hands the baton over for good."""
        self._finished[rank] = True
        self._hand_over(rank)

    def abort(self, rank: int, error: BaseException) -> None:
        """Ends the world because of `error` on `rank`. Only the first cause counts."""
        if self._failure is None:
            self._failure = (rank, f"rank {rank} failed: {type(error).__name__}: {error}", error)
        for gate in self._gates:
            gate.put(None)

    def check(self) -> None:
        """Raises RankFailure if the world has ended."""
        if self._failure is not None:
            culprit, message, cause = self._failure
            raise RankFailure(culprit, message) from cause

    def _hand_over(self, rank: int) -> None:
        self._handed_over = time.monotonic()
        for distance in range(1, self._size + 1):
            other = (rank + distance) % self._size
            wait = self._waits[other]
            if not self._finished[other] and (wait is None or wait.ready()):
                self._holder = other
                self._gates[other].put(None)
                return
        # Nobody can go on. If all waits are idle, rank 0 has ended without telling the others, which is reported to
        # them here; any other wait says more about the cause.
        stuck = [wait for wait in self._waits if wait is not None]
        stuck.sort(key=lambda wait: wait.idle)
        if not all(self._finished):
            self._give_up(stuck[0], "while no rank can go on")

    def _give_up(self, wait: Wait, why: str) -> None:
        missing = wait.missing()
        names = ", ".join(f"rank {rank} ({self._state(rank)})" for rank in missing)
        if self._failure is None:
            self._failure = (missing[0] if missing else -1, f"{wait.what}: waited for {names} {why}", None)
        for gate in self._gates:
            gate.put(None)

    def _state(self, rank: int) -> str:
        wait = self._waits[rank]
        if self._finished[rank]:
            return "ended"
        return "running" if wait is None else f"in {wait.what}"

    def _time_left(self) -> float:
        return max(0.0, self._handed_over + self._deadline_s - time.monotonic())
