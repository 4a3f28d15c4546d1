"""The control channel between threads of one process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from splash_trt.dist.baton import Baton, Wait
from splash_trt.dist.board import Phase, Watch
from splash_trt.dist.collectives import RankFailure
from splash_trt.dist.control import Control, Kind, Message

MAX_BEHIND = 4  # messages that a rank may lag behind before rank 0 waits for it


@dataclass
class Mailboxes:
    """The messages and start-up outcomes that the ranks of one world share."""

    size: int
    queues: list[deque[Message]] = field(init=False)
    outcomes: dict[int, str | None] = field(default_factory=dict)
    """What each rank passed to `agree`."""

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.size)]

    def behind(self, limit: int) -> list[int]:
        """The ranks with more than `limit` messages still to receive."""
        return [rank for rank, waiting in enumerate(self.queues) if len(waiting) > limit]


class ThreadControl(Control):
    """One rank's end; all over the same `boxes` and `baton`."""

    def __init__(self, rank: int, boxes: Mailboxes, baton: Baton, watch: Watch) -> None:
        self.rank = rank
        self.size = boxes.size
        self._boxes = boxes
        self._baton = baton
        self._watch = watch

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        assert self.rank == 0, self.rank
        self._baton.check()
        for waiting in self._boxes.queues[1:]:
            waiting.append(Message(kind, payload))
        limit = 0 if kind is Kind.STOP else MAX_BEHIND
        self._watch.enter(Phase.CONTROL)
        wait = Wait("send", lambda: not self._boxes.behind(limit), lambda: self._boxes.behind(limit))
        self._baton.wait(self.rank, wait)
        self._watch.leave()

    def receive(self) -> Message:
        assert self.rank != 0
        waiting = self._boxes.queues[self.rank]
        self._watch.idle()
        self._baton.wait(self.rank, Wait("receive", lambda: bool(waiting), lambda: [0], idle=True))
        self._watch.leave()
        return waiting.popleft()

    def agree(self, error: str | None) -> None:
        outcomes = self._boxes.outcomes
        self._baton.check()
        outcomes[self.rank] = error
        wait = Wait(
            "start-up",
            lambda: len(outcomes) == self.size or any(outcomes.values()),
            lambda: [rank for rank in range(self.size) if rank not in outcomes],
        )
        self._watch.idle()
        self._baton.wait(self.rank, wait)
        for rank, outcome in sorted(outcomes.items()):
            if outcome is not None:
                raise RankFailure(rank, f"start-up failed on rank {rank}: {outcome}")
        self._watch.end_step()
