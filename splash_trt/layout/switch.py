"""The states of a switch from one layout to another, and the moves between them that are legal.

    steady ──> preparing ──> migrating ──> armed ──(commit)──> retiring ──> steady
                   │             │           │
                   └─────────────┴───────────┴──> aborting ──> steady

preparing: room is made (pages leave the top of the arena, admissions wait), and every running request gets a second
    placement. From then on its new cache rows are written under both placements.
migrating: the rows computed before that, and weights, are moved under a budget.
armed:     everything to move is in plans that were sent; all ranks have to complete these plans.
retiring:  the new layout serves; pages of the old one become free when the last plans that name them have completed.
aborting:  the old layout serves on; pages of the target become free likewise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from splash_trt.config import Layout


class State(str, Enum):
    STEADY = "steady"
    PREPARING = "preparing"
    MIGRATING = "migrating"
    ARMED = "armed"
    RETIRING = "retiring"
    ABORTING = "aborting"


LEGAL: dict[State, frozenset[State]] = {
    State.STEADY: frozenset({State.PREPARING}),
    State.PREPARING: frozenset({State.MIGRATING, State.ABORTING}),
    State.MIGRATING: frozenset({State.ARMED, State.ABORTING}),
    State.ARMED: frozenset({State.RETIRING, State.ABORTING}),
    State.RETIRING: frozenset({State.STEADY}),
    State.ABORTING: frozenset({State.STEADY}),
}
ABORTABLE = frozenset({State.PREPARING, State.MIGRATING, State.ARMED})


class Abort(str, Enum):
    """The kinds of reasons for aborting a switch, for counting."""

    NO_ROOM = "no_room"
    DEADLINE = "deadline"
    COPY_FAILED = "copy_failed"
    REPLACED = "replaced"  # by a switch to somewhere else
    ASKED = "asked"  # whoever drives the scheduler wants to stay


class IllegalMove(RuntimeError):
    """A move between states that LEGAL does not list: a bug."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a switch goes, and why. owners: {request id: rank} of requests that are to have this owner; they may move
    also within one layout."""

    layout: Layout
    why: str
    owners: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Record:
    """What is published about one switch. Bytes are counted when they are put into plans, by kind."""

    number: int
    """Counts switches from 1."""
    source: str
    target: str
    why: str
    begin_step: int
    ended: bool = False
    """The switch is over, and what it left behind is free."""
    outcome: str = "under way"
    abort: str | None = None
    """The kind of reason (Abort) if it was aborted; `outcome` has it in full."""
    bytes_between_ranks: dict[str, int] = field(default_factory=lambda: {"weights": 0, "pages": 0, "new_rows": 0})
    bytes_inside_ranks: int = 0
    rows_to_move: int = 0
    rows_moved: int = 0
    steps_in: dict[str, int] = field(default_factory=dict)
    seconds_in: dict[str, float] = field(default_factory=dict)
    slowdown: float | None = None
    """Median time of the steps that moved something over that of steps that moved nothing, less 1 (meter.py)."""
    stall_s: float | None = None
    """What the commit cost: the slowest rank's gap before the first step of the new layout, less the median gap."""

    @property
    def progress(self) -> float:
        """Share of the rows to move that have moved, 0 to 1; 1 once committed."""
        if self.outcome == "committed":
            return 1.0
        return min(1.0, self.rows_moved / self.rows_to_move) if self.rows_to_move else 0.0


class SwitchMachine:
    """The state, and how long each one took."""

    def __init__(self) -> None:
        self.state = State.STEADY
        self._since_step = 0
        self._since_s = 0.0

    def to(self, state: State, step: int, now: float, record: Record) -> None:
        """Go to `state`; IllegalMove if LEGAL does not list it. Adds the time in the old state to the record."""
        if state not in LEGAL[self.state]:
            raise IllegalMove(f"switch: {self.state.value} -> {state.value} at step {step}")
        if self.state is not State.STEADY:
            name = self.state.value
            record.steps_in[name] = record.steps_in.get(name, 0) + step - self._since_step
            record.seconds_in[name] = record.seconds_in.get(name, 0.0) + now - self._since_s
        self.state, self._since_step, self._since_s = state, step, now
