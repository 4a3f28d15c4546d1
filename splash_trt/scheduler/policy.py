"""Which layout the load asks for. Pure functions over what rank 0 knows; the orchestrator acts on the answer.

This policy starts from a rule of thumb and corrects it by measured step times: a layout that was measured slower than
another for a batch of this size loses to it. It is sticky: it changes its mind only after several looks in a row, not
soon after a switch, not for a small gain, and leaves data parallel only when well below the crowd that led to it. A
long prompt is the exception: what is left of it is known, and it would be over before several looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a policy looks at. Tokens are cache rows."""

    now: float
    layout: Layout
    num_ranks: int
    running: int
    waiting: int
    held_tokens: int
    """Of all running requests."""
    longest_prefill: int
    """Prompt tokens still to compute of the request that has most of them, waiting ones included."""
    chunk_tokens: int
    """Most tokens of one step."""
    capacity_tokens: dict[Layout, int]
    """Distinct tokens that each allowed layout holds."""


@dataclass(frozen=True)
class Decision:
    layout: Layout
    why: str
    kind: str = "load"
    """The reason as one word of a few, to count by."""


class Policy(Protocol):
    """observe() is told every step's time; decide() is asked before every step and answers None to stay."""

    def observe(self, layout: Layout, running: int, num_tokens: int, seconds: float) -> None: ...

    def decide(self, load: Load) -> Decision | None: ...


LONG_PREFILL_CHUNKS = 4  # a prompt of so many steps or more is long
CROWD_PER_RANK = 2  # so many requests a rank make data parallel's shares even
STILL_CROWD_PER_RANK = 1  # in data parallel: so many are still a crowd
FULL_SHARE = 0.9  # of the cache: above it, room decides
MIN_GAIN = 0.1  # of the step time
LOOKS = 8  # times in a row that the answer must be the same; for a long prompt one is enough
MIN_STEPS = 8  # before the mean of their times counts as measured
MIN_DWELL_S = 2.0
SMOOTHING = 0.1  # weight of a new step time in the running mean


class MeasuredPolicy:
    """Rule of thumb, corrected by running means of decode step times per (layout, batch size class)."""

    def __init__(self) -> None:
        self._times: dict[tuple[Layout, int], tuple[int, float]] = {}  # steps, mean
        self._wanted: Layout | None = None
        self._looks = 0
        self._since = 0.0
        self._layout: Layout | None = None

    def observe(self, layout: Layout, running: int, num_tokens: int, seconds: float) -> None:
        if num_tokens != running or running == 0:
            return  # prefill in it: no measure of a decode step
        key = (layout, running.bit_length())
        steps, mean = self._times.get(key, (0, seconds))
        self._times[key] = (steps + 1, mean + max(SMOOTHING, 1 / (steps + 1)) * (seconds - mean))

    def decide(self, load: Load) -> Decision | None:
        if load.layout is not self._layout:
            self._layout, self._since = load.layout, load.now
        wanted, why = self._wish(load)
        if wanted is load.layout:
            self._wanted = None
            return None
        self._looks = self._looks + 1 if wanted is self._wanted else 1
        self._wanted = wanted
        looks = 1 if wanted is Layout.CP else LOOKS
        if self._looks < looks or load.now - self._since < MIN_DWELL_S:
            return None
        self._wanted = None
        return Decision(wanted, why)

    def _wish(self, load: Load) -> tuple[Layout, str]:
        wanted, why = rule_of_thumb(load)
        full = load.held_tokens > FULL_SHARE * load.capacity_tokens[load.layout]
        if full or wanted is Layout.CP:
            return wanted, why  # times of decode steps say nothing about room, and nothing about prompts
        size = load.running.bit_length()
        here, there = self._measured(load.layout, size), self._measured(wanted, size)
        if here is not None and there is not None and there > here * (1 - MIN_GAIN):
            return load.layout, f"{wanted.name.lower()} was measured no faster: {there:.4f} s a step against {here:.4f}"
        return wanted, why

    def _measured(self, layout: Layout, size: int) -> float | None:
        steps, mean = self._times.get((layout, size), (0, 0.0))
        return mean if steps >= MIN_STEPS else None


def rule_of_thumb(load: Load) -> tuple[Layout, str]:
    """The layout that the shape of the load suggests, among those allowed, and why."""
    allowed = load.capacity_tokens
    if not load.running and not load.waiting:
        return load.layout, "idle"
    per_rank = STILL_CROWD_PER_RANK if load.layout is Layout.DP else CROWD_PER_RANK
    crowd = load.running + load.waiting >= per_rank * load.num_ranks
    long_prefill = load.longest_prefill >= LONG_PREFILL_CHUNKS * load.chunk_tokens
    wishes: list[tuple[Layout, str]] = []
    if long_prefill and not crowd:
        wishes.append((Layout.CP, f"a prompt of {load.longest_prefill} tokens, few requests"))
    if crowd:
        wishes.append((Layout.DP, f"{load.running} running and {load.waiting} waiting requests"))
        wishes.append((Layout.DOP, "a crowd that needs the cache that replicated weights would take"))
    else:
        wishes.append((Layout.TP, f"only {load.running + load.waiting} requests"))
        wishes.append((Layout.DOP, "few requests, too long for replicated caches"))
    fits = [wish for wish in wishes if wish[0] in allowed and load.held_tokens <= FULL_SHARE * allowed[wish[0]]]
    if not fits:
        owned = [layout for layout in allowed if SPECS[layout].placement is not PlacementKind.REPLICATED]
        roomiest = max(owned or list(allowed), key=lambda layout: allowed[layout])
        return roomiest, "the cache is full: room decides"
    if crowd and load.waiting and fits[0][0] is Layout.DP and load.held_tokens > FULL_SHARE / 2 * allowed[Layout.DP]:
        roomier = [wish for wish in fits if wish[0] is Layout.DOP]
        if roomier and allowed[Layout.DOP] > allowed[Layout.DP] * (1 + MIN_GAIN):
            return roomier[0]
    return fits[0]
