"""A trace of rank 0's steps, moves, switch states and commits, for ui.perfetto.dev and chrome://tracing.

The file is a JSON array of trace events, one per line, written as they happen. A run that is killed leaves an array
without "]", whose last line may be incomplete; both viewers read that. When the file has grown to half of max_bytes, it
is renamed to FILE.previous and a new one begins, so that the latest events are always there.

All times are on rank 0's clock, from the trace's begin. In the trace, each rank is a process with these tracks:

    rank 0   steps      the time of a step on rank 0, which is that of all ranks, since they meet in every layer
             switch     the states of a switch
    rank r   moves      the bytes that it sends and receives in a step, drawn as long as the step
             commits    the first step of a new layout, with the gap before it that the rank reported
             gap        a counter: seconds between two steps, which ranks report in steps that belong to a switch

Source: "Trace Event Format" by Google, the JSON array form.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np

from splash_trt.plan import Plan, StepResult

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
STEPS, SWITCH, MOVES, COMMITS = range(1, 5)
TRACKS = {STEPS: "steps", SWITCH: "switch", MOVES: "moves", COMMITS: "commits"}


class SwitchRecord(Protocol):
    """What is traced of the switch under way; layout/switch.py's Record has these fields."""

    number: int
    source: str
    target: str
    why: str


class Observer(Protocol):
    """Is called by the orchestrator in its turns. state, record: of the switch, at that moment; now: the orchestrator's
    time."""

    def planned(self, plan: Plan | None, state: str, record: SwitchRecord | None, now: float) -> None:
        """A plan is about to be sent; None: there was nothing to do."""

    def completed(self, plan: Plan, result: StepResult, state: str, record: SwitchRecord | None, now: float) -> None:
        """A plan's result has come. Plans complete in the order in which they were sent."""


class TraceFile:
    """A trace in two files, the present one and the one before it, each of about max_bytes / 2 at most. Raises OSError
    if it cannot be created.

    header, footer: return the events with which every file begins and ends.
    """

    def __init__(
        self,
        path: Path,
        header: Callable[[], list[dict[str, object]]],
        footer: Callable[[], list[dict[str, object]]],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path = path
        self._header = header
        self._footer = footer
        self._half = max_bytes // 2
        self._size = 0
        self._file: BinaryIO | None = self._open()

    def write(self, *events: dict[str, object]) -> None:
        """Writes events. Does nothing once writing has failed."""
        with self._giving_up() as file:
            if file is not None:
                self._put(file, events)

    def turn_over(self) -> None:
        """Begins a new file if this one is full."""
        with self._giving_up() as file:
            if file is not None and self._size > self._half:
                self._end(file)
                os.replace(self._path, self._path.with_name(self._path.name + ".previous"))
                self._file = self._open()

    @contextmanager
    def _giving_up(self) -> Iterator[BinaryIO | None]:
        """Yields the file. If writing to it fails, the trace ends, and serving goes on."""
        try:
            yield self._file
        except OSError as error:
            log.error("the trace %s ends here: %s", self._path, error)
            self._file = None

    def close(self) -> None:
        with self._giving_up() as file:
            if file is not None:
                self._end(file)
        self._file = None

    def _open(self) -> BinaryIO:
        file = open(self._path, "wb", buffering=0)
        self._size = file.write(b"[")
        self._put(file, self._header())
        return file

    def _put(self, file: BinaryIO, events: tuple[dict[str, object], ...] | list[dict[str, object]]) -> None:
        lines = [(b",\n" if self._size > 1 or i else b"\n") + msgspec.json.encode(e) for i, e in enumerate(events)]
        self._size += file.write(b"".join(lines))

    def _end(self, file: BinaryIO) -> None:
        self._put(file, self._footer())
        file.write(b"\n]\n")
        file.close()


class StepTracer:
    """An Observer that writes a trace. row_bytes: of a token's cache row, all layers; number_bytes: of a weight."""

    def __init__(
        self,
        path: Path,
        num_ranks: int,
        row_bytes: int,
        number_bytes: int,
        *,
        now: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """now: the begin, on the clock of the Observer's calls; None: time.monotonic()."""
        self._num_ranks = num_ranks
        self._row_bytes = row_bytes
        self._number_bytes = number_bytes
        self._begin = time.monotonic() if now is None else now
        self._unix_s = time.time()
        self._now = self._begin
        self._sent: dict[int, float] = {}
        self._steps_end = self._begin
        self._epoch = 0
        self._state: tuple[str, int] | None = None
        self._state_event: dict[str, object] | None = None
        self._file = TraceFile(path, self._header, self._footer, max_bytes)

    def close(self) -> None:
        self._file.close()

    def planned(self, plan: Plan | None, state: str, record: SwitchRecord | None, now: float) -> None:
        self._now = now
        self._file.turn_over()
        self._follow(state, record)
        if plan is not None:
            self._sent[plan.step] = now

    def completed(self, plan: Plan, result: StepResult, state: str, record: SwitchRecord | None, now: float) -> None:
        self._now = now
        # Steps run one after the other, so a plan that was sent while another ran began when that had ended.
        begin = max(self._sent.pop(plan.step, now), self._steps_end)
        end = min(begin + result.seconds, max(now, begin))
        self._steps_end = end
        ts, dur = self._us(begin), round((end - begin) * 1e6, 1)
        moved = plan.copied_bytes(self._num_ranks, self._row_bytes, self._number_bytes)
        events = [self._step(plan, result, ts, dur, int(moved[0].sum())), *_moves(plan, moved, ts, dur)]
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            events += [self._commit(plan, result, rank, ts) for rank in range(self._num_ranks)]
        for rank, status in enumerate(result.statuses):
            gap = _event("C", "gap", rank, 0, ts, args={"seconds": status.gap_s})
            events.append(gap)
            if status.error:
                events.append(_event("i", "copy failed", rank, MOVES, ts + dur, s="t", args={"error": status.error}))
        self._file.write(*events)
        self._follow(state, record)

    def _us(self, now: float) -> float:
        return round((now - self._begin) * 1e6, 1)

    def _header(self) -> list[dict[str, object]]:
        started = {"unix_s": self._unix_s, "clock": "rank 0's, from the begin of the trace"}
        events = [_event("i", "trace", 0, SWITCH, self._us(self._now), s="g", args=started)]
        for rank in range(self._num_ranks):
            events.append(_event("M", "process_name", rank, 0, args={"name": f"rank {rank}"}))
            events.append(_event("M", "process_sort_index", rank, 0, args={"sort_index": rank}))
            tracks = TRACKS if rank == 0 else {MOVES: TRACKS[MOVES], COMMITS: TRACKS[COMMITS]}
            for track, name in tracks.items():
                events.append(_event("M", "thread_name", rank, track, args={"name": name}))
        if self._state_event is not None:
            events.append({**self._state_event, "ts": self._us(self._now)})
        return events

    def _footer(self) -> list[dict[str, object]]:
        return [] if self._state_event is None else [self._end_of_state()]

    def _end_of_state(self) -> dict[str, object]:
        assert self._state_event is not None
        return _event("E", str(self._state_event["name"]), 0, SWITCH, self._us(self._now))

    def _follow(self, state: str, record: SwitchRecord | None) -> None:
        """Writes a change of the switch's state as the end and begin of a slice. A state that lasts less than a turn is
        not seen."""
        present = None if record is None else (state, record.number)
        if present == self._state:
            return
        events = self._footer()
        self._state, self._state_event = present, None
        if record is not None:
            args = {"number": record.number, "source": record.source, "target": record.target, "why": record.why}
            self._state_event = _event("B", state, 0, SWITCH, self._us(self._now), args=args)
            events.append(self._state_event)
        self._file.write(*events)

    def _step(self, plan: Plan, result: StepResult, ts: float, dur: float, moved_bytes: int) -> dict[str, object]:
        args = {
            "step": plan.step,
            "epoch": plan.epoch,
            "tokens": plan.num_tokens,
            "rows": plan.num_rows,
            "tokens_by_rank": plan.counts.tolist(),
            "moved_bytes": moved_bytes,
            "seconds": result.seconds,
        }
        return _event("X", plan.layout.name.lower(), 0, STEPS, ts, dur=dur, args=args)

    def _commit(self, plan: Plan, result: StepResult, rank: int, ts: float) -> dict[str, object]:
        args: dict[str, object] = {"step": plan.step, "epoch": plan.epoch}
        if result.statuses:
            args["gap_s"] = result.statuses[rank].gap_s
        return _event("i", f"commit: {plan.layout.name.lower()}", rank, COMMITS, ts, s="p", args=args)


def _moves(
    plan: Plan, moved: tuple[np.ndarray, np.ndarray, np.ndarray], ts: float, dur: float
) -> list[dict[str, object]]:
    """An event for each rank that takes part in the plan's copies."""
    events = []
    for rank in np.flatnonzero(sum(moved)).tolist():
        sent, received, inside = (int(part[rank]) for part in moved)
        args = {"step": plan.step, "sent_bytes": sent, "received_bytes": received, "inside_bytes": inside}
        events.append(_event("X", "moves", rank, MOVES, ts, dur=dur, args=args))
    return events


def _event(ph: str, name: str, pid: int, tid: int, ts: float = 0.0, **more: object) -> dict[str, object]:
    return {"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": ts, **more}
