"""One request's life on rank 0, and the waiting ones in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from splash_trt.request import FinishReason, Request


@dataclass(eq=False)
class Sequence:
    """A request and the tokens known of it so far."""

    request: Request
    arrival: int
    """Counts requests; with the priority it orders them for good."""
    limit: int
    """Most tokens, prompt included."""
    capped: bool
    """`limit` is what the cache can hold, less than the request allows."""
    expires: float | None = None
    """On the orchestrator's clock, seconds."""
    arrived: float = 0.0
    """On the same clock."""
    queued_s: float | None = None
    """From its arrival to its first admission."""
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    """-1 while it holds no cache."""
    rows_in_flight: int = 0
    scored: int = 0
    """Prompt positions whose log-probability has been planned."""
    reported: int = 0
    """Prompt positions whose log-probability has been told."""
    void_through: int = 0
    """Results of plans up to this one are not this request's: they read cache rows that were lost, or were made before
    it was put back to be computed again. A request that has ended takes none at all."""
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def key(self) -> tuple[int, int]:
        """Smaller goes first; unique, so that nothing is ever decided by chance."""
        return (-self.request.priority, self.arrival)

    def known(self, begin: int, end: int) -> np.ndarray:
        """Token ids at positions [begin, end), int64."""
        return np.array(self.tokens[begin:end], np.int64)


class WaitingQueue:
    """Sequences without cache, the one to admit next first. Removal is lazy."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._waiting)

    def push(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        heapq.heappush(self._heap, (sequence.key, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)
