"""A request as the scheduler knows it, from arrival to end, and the queue of those that wait for cache."""

from __future__ import annotations

import heapq
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
    """Results of plans up to this one are ignored: those plans read cache rows that were lost, or were made before the
    request was sent back to be computed again. NEVER once the request has ended: all results are ignored."""
    finish: FinishReason | None = None
    id: str = ""
    first_total: int = 0
    """Number of tokens, prompt included, once the first output token is there."""
    plain_below: int = 0
    """While the request has fewer tokens than this, its next token is plain: it wants no log-probabilities, and only a
    stop token ends it. 0: the request wants log-probabilities, so that no token is plain."""

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
        """Why the request ends with the last token it has; None: it goes on."""
        if self.tokens[-1] in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def end(self, reason: FinishReason) -> None:
        """From now on all results are ignored."""
        self.finish, self.void_through = reason, NEVER

    def known(self, begin: int, end: int) -> np.ndarray:
        """Token ids at positions [begin, end), int64."""
        return np.array(self.tokens[begin:end], np.int64)


class WaitingQueue:
    """Sequences that wait for cache, in the order in which they are to be admitted: overdue ones (max_wait_s after
    their arrival) by arrival, then the others by priority and arrival. Removal is lazy: heaps may hold entries of
    sequences that no longer wait, which `peek` skips."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting: dict[int, Sequence] = {}  # by arrival
        self._due: list[tuple[float, int]] = []  # (when it becomes overdue if it still waits, arrival): a heap

    def __len__(self) -> int:
        return len(self._waiting)

    def tokens(self) -> np.ndarray:
        """[W] known tokens of each waiting request, in the order of admission: what it has to compute (again) before
        its next new token."""
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
