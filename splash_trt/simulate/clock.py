"""The clock of a simulation, which simulated steps and arrivals advance."""

from __future__ import annotations


class SimulatedClock:
    """Calling it returns the seconds since the start. It only moves when told to, and only forwards."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, to: float) -> None:
        """Go to time `to`, unless that is past."""
        if to > self.now:
            self.now = to
