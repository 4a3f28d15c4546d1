"""Measures a rank's steps, and the gaps between them, by the clock of the device that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class Clock(Protocol):
    """Call `begin` and `end` around each step, as steps are enqueued."""

    def begin(self) -> None: ...

    def end(self) -> Callable[[], float]:
        """Returns a function that waits for the step's end and gives the step's seconds."""
        ...

    def gap(self) -> torch.Tensor:
        """[1] int64: nanoseconds between the end of the step before and the begin of the present one."""
        ...


class HostClock:
    """For CPUs, where work is done when a call returns."""

    def __init__(self) -> None:
        self._begin = self._end = time.monotonic()
        self._gap = 0.0

    def begin(self) -> None:
        self._begin = time.monotonic()
        self._gap = self._begin - self._end

    def end(self) -> Callable[[], float]:
        self._end = time.monotonic()
        seconds = self._end - self._begin
        return lambda: seconds

    def gap(self) -> torch.Tensor:
        return torch.tensor([round(self._gap * 1e9)])


class CudaClock:
    """For a GPU's stream. The GPU takes the times itself, so the host need not wait for it."""

    def __init__(self, stamp: Callable[[torch.Tensor], None], device: torch.device) -> None:
        """stamp: writes the GPU's time in ns into a tensor [1] int64, in the stream's order."""
        self._stamp = stamp
        self._begun = torch.zeros(1, dtype=torch.int64, device=device)
        self._ended = torch.zeros_like(self._begun)
        stamp(self._ended)
        self._begin_event: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._stamp(self._begun)
        self._begin_event = torch.cuda.Event(enable_timing=True)
        self._begin_event.record()

    def end(self) -> Callable[[], float]:
        begin, end = self._begin_event, torch.cuda.Event(enable_timing=True)
        assert begin is not None
        self._stamp(self._ended)
        end.record()

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3

        return seconds

    def gap(self) -> torch.Tensor:
        return self._begun - self._ended
