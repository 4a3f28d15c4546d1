"""How many bytes a rank may send or receive for a switch in one step."""

from __future__ import annotations

import math
from statistics import median

REFERENCE_STEP_S = 0.01
"""Budgets are those of a step of this length or less; in a longer one, which hides more, so much more may move."""
STEPS_BETWEEN = 8  # that moved something, before they are judged
MOST_STEPS = 64  # that are looked at before they are taken to say nothing
GROWTH = 1.25
MAX_BUDGET_BYTES = 256 << 20


def scaled(num_bytes: int, step_s: float) -> int:
    """A budget for a step that takes step_s."""
    return round(num_bytes * max(1.0, step_s / REFERENCE_STEP_S))


class Budget:
    """Grows while steps that move something are hardly slower than like steps that do not, and shrinks when they are.

    Every switch begins with start_bytes; the budget stays between floor_bytes and ceiling_bytes. max_slowdown: 0.05
    means 5 %.

    Steps vary by more than the slowdown that is allowed, so it is their median that is judged, with its own error: it
    shrinks what is surely too much (by two errors), grows what is probably not (by one), and looks at more steps in
    between. Judged without it, a budget whose steps vary by 3 % would shrink to nothing under a limit of 0.5 %.
    """

    def __init__(self, start_bytes: int, floor_bytes: int, ceiling_bytes: int, max_slowdown: float) -> None:
        self._floor, self._ceiling = floor_bytes, max(floor_bytes, ceiling_bytes)
        self._max_slowdown = max_slowdown
        self.start_bytes = start_bytes
        self._ratios: list[float] = []
        self.begin()

    def begin(self) -> None:
        """A new switch: how busy the machine was during an earlier one says nothing of this one."""
        self.bytes_per_step = min(max(self.start_bytes, self._floor), self._ceiling)
        self._ratios.clear()

    def observe(self, ratio: float) -> None:
        """The time of one step that moved something, over that of like steps that moved nothing."""
        self._ratios.append(ratio)
        if len(self._ratios) % STEPS_BETWEEN:
            return
        middle, limit = median(self._ratios), 1 + self._max_slowdown
        error = _error_of_median(self._ratios, middle)
        if middle - 2 * error > limit:
            self._change_to(self.bytes_per_step // 2)
        elif middle + error <= limit:
            self._change_to(int(self.bytes_per_step * GROWTH))
        elif len(self._ratios) >= MOST_STEPS:
            self._change_to(self.bytes_per_step)

    def _change_to(self, num_bytes: int) -> None:
        self.bytes_per_step = min(max(num_bytes, self._floor), self._ceiling)
        self._ratios.clear()

    def in_time(self, left_bytes: int, left_s: float, step_s: float) -> int:
        """The budget for the next step, raised if need be so that left_bytes are moved in half of left_s.

        A switch that misses its deadline has cost its slow-down for nothing. step_s: what a step takes.
        """
        steps = left_s / 2 / step_s if step_s > 0 else float("inf")
        usual = scaled(self.bytes_per_step, step_s)
        return min(max(usual, round(left_bytes / max(steps, 1.0))), scaled(self._ceiling, step_s))


def _error_of_median(values: list[float], middle: float) -> float:
    """Its standard error, were the values normal: 1.2533 sigma / sqrt(n), and sigma 1.4826 times the median distance
    from the median, which a few outliers do not change."""
    return 1.2533 * 1.4826 * median(abs(x - middle) for x in values) / math.sqrt(len(values))


class Allowance:
    """One step's budget, spent rank by rank: what each may still send and receive."""

    def __init__(self, bytes_per_step: int, num_ranks: int) -> None:
        self._sent = [bytes_per_step] * num_ranks
        self._received = [bytes_per_step] * num_ranks

    def room(self, source: int, targets: list[int], unit_bytes: int) -> int:
        """How many units of unit_bytes `source` may still send to every one of `targets`."""
        least = min((self._received[target] for target in targets), default=0)
        return min(self._sent[source] // len(targets), least) // unit_bytes if targets else 0

    def spend(self, source: int, targets: list[int], num_bytes: int) -> None:
        """num_bytes go from `source` to each of `targets`."""
        self._sent[source] -= num_bytes * len(targets)
        for target in targets:
            self._received[target] -= num_bytes

    @property
    def spent(self) -> bool:
        """Nobody may send or nobody may receive any more."""
        return max(self._sent) <= 0 or max(self._received) <= 0
