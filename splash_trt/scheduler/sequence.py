"""One request's life on rank 0, and the waiting ones in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from splash_trt.request import MAX_PRIORITY, FinishReason, Request

NEVER = 1 << 62  # a plan's number that no plan reaches
OVERDUE = MAX_PRIORITY + 1  # the seniority of requests that waited too long: before every priority


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and the tokens known of it so far."""

    request: Request
    arrival: int
    """Counts requests."""
    limit: int
    """Most tokens, prompt included."""
    capped: bool
    """`limit` is what the cache can hold, less than the request allows."""
    stops: frozenset[int] = frozenset()
    """Token ids that end it."""
    arrived: float = 0.0
    """On the orchestrator's clock, seconds."""
    queued_s: float | None = None
    """From its arrival to its first admission."""
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    """-1 while it holds no cache."""
    last_row: int = 0
    """While it waits: the last plan with a row of it."""
    overdue: bool = False
    """It waited for too long once, and goes before all that are not overdue from then on."""
    scored: int = 0
    """Prompt positions whose log-probability has been planned."""
    reported: int = 0
    """Prompt positions whose log-probability has been told."""
    void_through: int = 0
    """Results of plans up to this one are not this request's: they read cache rows that were lost, or were made before
    it was put back to be computed again. A request that has ended takes none at all."""
    finish: FinishReason | None = None
    id: str = ""
    first_total: int = 0
    """Tokens with the first one of output."""
    plain_below: int = 0
    """While it has fewer tokens than this, another one ends it only if it is a stop; 0: it wants log-probabilities."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.id = self.request.id
        self.first_total = len(self.tokens) + 1
        p = self.request.sampling
        self.plain_below = self.limit - 1 if p.logprobs is None and p.prompt_logprobs is None else 0

    @property
    def seniority(self) -> int:
        """Larger goes first: the priority, or OVERDUE."""
        return OVERDUE if self.overdue else self.request.priority

    @property
    def key(self) -> tuple[int, int]:
        """Smaller goes first; unique, so that nothing is ever decided by chance."""
        return (-self.seniority, self.arrival)

    def ends_here(self) -> FinishReason | None:
        """Whether the last token known is its last."""
        if self.tokens[-1] in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def end(self, reason: FinishReason) -> None:
        """No result is this request's any more."""
        self.finish, self.void_through = reason, NEVER

    def known(self, begin: int, end: int) -> np.ndarray:
        """Token ids at positions [begin, end), int64."""
        return np.array(self.tokens[begin:end], np.int64)


class WaitingQueue:
    """Sequences without cache, the one to admit next first: those that waited longer than max_wait_s by arrival, then
    the others by priority and arrival. Removal is lazy."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting: dict[int, Sequence] = {}  # by arrival
        self._due: list[tuple[float, int]] = []  # (when it becomes overdue if it still waits, arrival): a heap

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._waiting.values())

    def tokens(self) -> np.ndarray:
        """[W] of each of them, the one to admit next first: to be computed before its first new one."""
        lengths = (len(sequence.tokens) for sequence in sorted(self._waiting.values(), key=lambda s: s.key))
        return np.fromiter(lengths, np.int64, len(self._waiting))

    def push(self, sequence: Sequence) -> None:
        """A sequence that has just arrived, or gave its cache up."""
        self._waiting[sequence.arrival] = sequence
        heapq.heappush(self._heap, (sequence.key, sequence))
        heapq.heappush(self._due, (sequence.arrived + self._max_wait_s, sequence.arrival))

    def peek(self, now: float) -> Sequence | None:
        """The one to admit next."""
        while self._due and self._due[0][0] < now:
            sequence = self._waiting.get(heapq.heappop(self._due)[1])
            if sequence is not None and not sequence.overdue:
                sequence.overdue = True
                heapq.heappush(self._heap, (sequence.key, sequence))

        while self._heap:
            key, sequence = self._heap[0]
            if sequence.arrival in self._waiting and key == sequence.key:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.arrival, None)
