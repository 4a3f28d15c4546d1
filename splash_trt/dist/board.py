"""The board: one row of numbers per rank that says what the rank is doing; all ranks of a node can read it at any time.

Rows are written with plain 8-byte stores and read without a lock. A reader may see a row that is partly updated, which
is good enough for its purpose: to name the rank that others wait for. Ranks write their rows through `Watch`.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass


class Phase(enum.IntEnum):
    """What a rank is doing."""

    STARTING = 0
    IDLE = 1
    COMPUTING = 2
    ALL_REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    CONTROL = 7
    ENDING = 8
    FAILED = 9
    SCHEDULING = 10

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", " ") if self is Phase.CONTROL else self.name.lower()


# Columns of a row, all int64. Times are CLOCK_MONOTONIC in nanoseconds, which processes of a node share.
_PID, _STEP, _COUNTER, _PHASE, _LAYER, _SINCE, _BEAT = range(7)
ROW_BYTES = 64
_ROW_ITEMS = ROW_BYTES // 8
NO_LAYER = -1
NO_STEP = -1


@dataclass(frozen=True)
class Row:
    """One rank's row, as read at one moment."""

    rank: int
    pid: int
    step: int
    counter: int
    """Collectives entered since the start; equal on ranks that have got equally far."""
    phase: Phase
    layer: int
    since_ns: int
    """When the phase was entered."""
    beat_ns: int
    """When the rank's watchdog last ran, which it does several times a second unless the process is stopped or killed.
    0: it has not run yet."""

    @property
    def place(self) -> str:
        """For messages: "step 17, all_reduce, layer 3"."""
        step = "before the first step" if self.step == NO_STEP else f"step {self.step}"
        return f"{step}, {self.phase.text}" + (f", layer {self.layer}" if self.layer != NO_LAYER else "")


class Board:
    """Rows of the global ranks `ranks`, in that order, over `memory` of len(ranks) * ROW_BYTES zeroed bytes."""

    def __init__(self, memory: memoryview, ranks: Sequence[int]) -> None:
        assert memory.nbytes == len(ranks) * ROW_BYTES, (memory.nbytes, ranks)
        self._items = memory.cast("B").cast("q")
        self.ranks = tuple(ranks)

    @classmethod
    def local(cls, size: int) -> Board:
        """A board in plain memory, for ranks that are threads of one process."""
        return cls(memoryview(bytearray(size * ROW_BYTES)), range(size))

    def cells(self, rank: int) -> memoryview:
        """The row of global rank `rank`, writable."""
        start = self.ranks.index(rank) * _ROW_ITEMS
        return self._items[start : start + _ROW_ITEMS]

    def read(self) -> list[Row]:
        """All rows, in the order of `ranks`."""
        return [_read(rank, self.cells(rank)) for rank in self.ranks]


def _read(rank: int, cells: memoryview) -> Row:
    return Row(
        rank=rank,
        pid=cells[_PID],
        step=cells[_STEP],
        counter=cells[_COUNTER],
        phase=Phase(cells[_PHASE]),
        layer=cells[_LAYER],
        since_ns=cells[_SINCE],
        beat_ns=cells[_BEAT],
    )


class Watch:
    """Writes a rank's own row. Every call is a few stores; none waits."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self._cells = board.cells(rank)
        self._outer = int(Phase.STARTING)
        self._cells[_PID] = os.getpid()
        self._cells[_STEP] = NO_STEP
        self._cells[_LAYER] = NO_LAYER
        self._set(Phase.STARTING)

    @property
    def step(self) -> int:
        """The step that the rank is in or was in last; NO_STEP before the first."""
        return self._cells[_STEP]

    def row(self) -> Row:
        return _read(self.rank, self._cells)

    def scheduling(self) -> None:
        """Rank 0 makes a plan or processes a result, until `begin_step` or `end_step`."""
        self._outer = int(Phase.SCHEDULING)
        self._set(self._outer)

    def begin_step(self, step: int) -> None:
        self._cells[_STEP] = step
        self._outer = int(Phase.COMPUTING)
        self._set(self._outer)

    def layer(self, index: int) -> None:
        """The layer that runs now; NO_LAYER outside of layers."""
        self._cells[_LAYER] = index

    def end_step(self) -> None:
        """The rank has nothing to do until the next plan, which has no deadline."""
        self._cells[_LAYER] = NO_LAYER
        self._outer = int(Phase.IDLE)
        self._set(self._outer)

    def enter(self, phase: Phase) -> None:
        """Begins an exchange with other ranks, until `leave`; not nested. Collectives are counted; messages are not,
        since only rank 0 sends them and counters must be comparable between ranks."""
        self._cells[_COUNTER] += Phase.ALL_REDUCE <= phase <= Phase.ALL_TO_ALL
        self._set(phase)

    def leave(self) -> None:
        """Ends what `enter` or `idle` began: the rank is in the phase before it again."""
        self._set(self._outer)

    def idle(self) -> None:
        """Begins a wait that has no deadline, until `leave`."""
        self._set(Phase.IDLE)

    def ending(self) -> None:
        self._outer = int(Phase.ENDING)
        self._set(self._outer)

    def failed(self) -> None:
        """This rank has failed: when the others end, they name it as the cause."""
        self._outer = int(Phase.FAILED)
        self._set(self._outer)

    def detach(self) -> None:
        """The board's memory is about to be freed: later calls write to a private copy of the row."""
        self._cells = memoryview(bytearray(self._cells.tobytes())).cast("q")

    def beat(self) -> None:
        """Called by the watchdog, as a sign of life."""
        self._cells[_BEAT] = time.monotonic_ns()

    def _set(self, phase: int) -> None:
        self._cells[_SINCE] = time.monotonic_ns()
        self._cells[_PHASE] = phase
