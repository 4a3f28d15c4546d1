"""The clock of a simulation, which simulated steps and arrivals advance."""

from __future__ import annotations


class SimulatedClock:
    """Seconds since the start; called, it tells them. It only moves when it is told to, and only forwards."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        """Go to `to`, or stay where it is past."""
        if to > self.now:
            self.now = to
