"""Where a simulation's requests come from: a trace, or a load that watches the server (adversary.py)."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Protocol

import numpy as np

from splash_trt.config import Layout
from splash_trt.simulate.traces import Trace


class Source(Protocol):
    """A source of requests, which are numbered from 0. The arrays [R] are valid for requests that have arrived."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    @property
    def max_output(self) -> int:
        """The largest number of output tokens of all requests."""

    def next_s(self) -> float | None:
        """When the next request arrives, as far as is known; None: not before another ends, or never."""

    def due(self, now: float) -> list[tuple[float, int]]:
        """(time, number) of the requests that have arrived by now; each is returned once."""

    def ended(self, numbers: list[int], now: float) -> None:
        """To be called when these requests have ended."""

    def watch(self, layout: Layout, now: float) -> None:
        """To be called after each step, with its layout."""


class TraceSource:
    """A Source of a trace's requests, which arrive by the clock or after others have ended."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.prompt_tokens = trace.prompt_tokens
        self.output_tokens = trace.output_tokens
        self._children: dict[int, list[int]] = defaultdict(list)
        for number in np.flatnonzero(trace.after >= 0).tolist():
            self._children[int(trace.after[number])].append(number)
        self._bounds = np.searchsorted(trace.wave, np.arange(int(trace.wave[-1]) + 2)).tolist()
        self._wave = -1
        self._left = 0  # requests of the waves begun so far that have not ended
        self._heap: list[tuple[float, int]] = []
        self._next_wave(0.0)

    @property
    def max_output(self) -> int:
        return int(self.output_tokens.max())

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[float, int]]:
        arrived = []
        while self._heap and self._heap[0][0] <= now:
            arrived.append(heapq.heappop(self._heap))
        return arrived

    def ended(self, numbers: list[int], now: float) -> None:
        for number in numbers:
            for child in self._children.pop(number, ()):
                heapq.heappush(self._heap, (now + float(self._trace.arrival_s[child]), child))
        self._left -= len(numbers)
        if not self._left:
            self._next_wave(now)

    def watch(self, layout: Layout, now: float) -> None:
        """Does nothing: a trace does not depend on layouts."""

    def _next_wave(self, now: float) -> None:
        while not self._left and self._wave + 2 < len(self._bounds):
            self._wave += 1
            begin, end = self._bounds[self._wave], self._bounds[self._wave + 1]
            roots = begin + np.flatnonzero(self._trace.after[begin:end] < 0)
            times = now + self._trace.arrival_s[roots]
            self._heap += zip(times.tolist(), roots.tolist(), strict=True)
            self._left = end - begin
        heapq.heapify(self._heap)
