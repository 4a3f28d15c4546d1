"""The history of the last half hour, second by second, from the engine's reports: requests, tokens, layouts, switches.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from splash_trt.frontend.engine_client import Listener
from splash_trt.link import Frames, SwitchReport

WINDOW_S = 1800
MAX_PHASES = 2000
MAX_SWITCHES = 50


class Seconds(msgspec.Struct, frozen=True):
    """One entry a second from `first` on, a second being the time since the frontend began, in whole seconds."""

    first: int
    running: list[int]
    """Requests that had cache, at most."""
    waiting: list[int]
    """Requests without cache yet, at most."""
    tokens: list[int]
    """Computed, prompt and output together."""
    output_tokens: list[int]
    """Of the engine, whichever frontend they went to."""


class Phase(msgspec.Struct, frozen=True):
    """From since_s on, until the next one: `layout` served, and a switch was in state `switch`, or "steady"."""

    since_s: float
    layout: str | None
    """None: no engine had said it yet."""
    switch: str
    target: str | None


class Switch(msgspec.Struct, frozen=True):
    """A switch's record as the engine tells it. began_s, ended_s: when the frontend heard of it."""

    began_s: float
    ended_s: float | None
    record: dict[str, Any]


class Timeline(msgspec.Struct, frozen=True):
    """What there is from second `after` on. `next` is the `after` to ask with for what follows."""

    server: str
    """Another one for each start of the frontend, with which its seconds begin anew."""
    engine: str | None
    """Another one for each start of the engine, with which its switches are numbered anew."""
    now_s: float
    window_s: int
    """So long back it reaches."""
    next: int
    seconds: Seconds
    phases: list[Phase]
    """The first one began before the first second, if anything did."""
    switches: list[Switch]
    """Those that began, ended or changed since, oldest first."""


class _Second:
    """The counts of one second."""

    __slots__ = ("running", "waiting", "tokens", "output_tokens")

    def __init__(self, running: int, waiting: int) -> None:
        self.running = running
        self.waiting = waiting
        self.tokens = 0
        self.output_tokens = 0


class _Kept:
    __slots__ = ("began_s", "ended_s", "changed_s", "record")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.ended_s: float | None = None
        self.changed_s = began_s
        self.record: dict[str, Any] = {}


class History:
    """A Listener that keeps the history, in bounded memory, and passes all reports on to `then`."""

    def __init__(
        self,
        then: Listener,
        clock: Callable[[], float] = time.monotonic,
        *,
        began_s: float | None = None,
        server: str | None = None,
    ) -> None:
        """began_s: second 0 on the clock. server: an id of the run. Frontends that share a port have the same."""
        self._then = then
        self._clock = clock
        self._began = clock() if began_s is None else began_s
        self._server = server or uuid.uuid4().hex
        self._engine: str | None = None
        self._seconds: deque[_Second] = deque([_Second(0, 0)], maxlen=WINDOW_S + 1)
        """The last one is the present second, self._second, which is not over."""
        self._second = int(self._now_s())
        self._running = self._waiting = 0
        self._phases: deque[Phase] = deque([Phase(self._now_s(), None, "steady", None)], maxlen=MAX_PHASES)
        self._switches: dict[int, _Kept] = {}

    def on_frames(self, frames: Frames) -> None:
        status, now_s = frames.status, self._now_s()
        self._go_on(now_s)
        second = self._seconds[-1]
        self._running, self._waiting = status.running, status.waiting
        second.running = max(second.running, status.running)
        second.waiting = max(second.waiting, status.waiting)
        second.tokens += frames.num_tokens
        second.output_tokens += frames.num_output
        self._engine = frames.incarnation
        target = status.switch_target if status.switch != "steady" else None
        self._enter(Phase(now_s, status.layout, status.switch, target))
        self._then.on_frames(frames)

    def on_switch(self, report: SwitchReport) -> None:
        if report.is_past:  # it is not known when it was
            self._then.on_switch(report)
            return
        now_s = self._now_s()
        kept = self._switches.setdefault(report.number, _Kept(now_s))
        kept.record, kept.changed_s = report.record, now_s
        if report.record.get("ended") and kept.ended_s is None:
            kept.ended_s = now_s
        while len(self._switches) > MAX_SWITCHES:
            del self._switches[min(self._switches)]
        self._then.on_switch(report)

    def on_restart(self) -> None:
        now_s = self._now_s()
        self._go_on(now_s)
        self._running = self._waiting = 0
        self._engine = None
        self._switches.clear()
        self._enter(Phase(now_s, None, "steady", None))
        self._then.on_restart()

    def since(self, after: int = 0) -> Timeline:
        """The history from second `after` on."""
        now_s = self._now_s()
        self._go_on(now_s)
        seconds = list(self._seconds)[:-1]  # without the present one
        oldest = self._second - len(seconds)
        first = min(max(after, oldest), self._second)
        seconds = seconds[first - oldest :]
        phases = [phase for phase in self._phases if phase.since_s >= after]
        before = [phase for phase in self._phases if phase.since_s < after]
        return Timeline(
            server=self._server,
            engine=self._engine,
            now_s=now_s,
            window_s=WINDOW_S,
            next=self._second,
            seconds=Seconds(
                first,
                [second.running for second in seconds],
                [second.waiting for second in seconds],
                [second.tokens for second in seconds],
                [second.output_tokens for second in seconds],
            ),
            phases=[*before[-1:], *phases],
            switches=[
                Switch(kept.began_s, kept.ended_s, kept.record)
                for kept in self._switches.values()
                if kept.changed_s >= after
            ],
        )

    def _now_s(self) -> float:
        return self._clock() - self._began

    def _go_on(self, now_s: float) -> None:
        """Begins the seconds since the last call. Nothing was reported in between, so each repeats the last counts."""
        second = int(now_s)
        for _ in range(min(second - self._second, WINDOW_S + 1)):
            self._seconds.append(_Second(self._running, self._waiting))
        self._second = max(self._second, second)

    def _enter(self, phase: Phase) -> None:
        last = self._phases[-1]
        if (phase.layout, phase.switch, phase.target) != (last.layout, last.switch, last.target):
            self._phases.append(phase)
            horizon = phase.since_s - WINDOW_S
            while len(self._phases) > 1 and self._phases[1].since_s < horizon:
                self._phases.popleft()
