"""How many bytes a rank may send or receive for a switch in one step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from statistics import median
from typing import NamedTuple

REFERENCE_STEP_S = 0.01
"""Budgets are those of a step of this length or less; in a longer one, which hides more, so much more may move."""
MAX_BUDGET_BYTES = 256 << 20
SMALLEST_SHARE = 16  # a budget is at least this part of what it begins with: less only prolongs a switch
AIM = 0.7  # of the slowdown that is allowed: the rest is for errors, and for what a switch costs however little moves
DOUBT = 0.5  # standard deviation of what is believed that start_bytes cost, over what is aimed at
LEAST_AIM = 1e-4  # less than that is never told from noise
KEPT = 256  # comparisons
MOST_GROWTH, MOST_SHRINKING = 1.25, 0.5  # from one comparison to the next


def scaled(num_bytes: int, step_s: float) -> int:
    """A budget for a step that takes step_s."""
    return round(num_bytes * max(1.0, step_s / REFERENCE_STEP_S))


class Comparison(NamedTuple):
    """A step of a switch that moved nothing, and those around it that did."""

    slowdown: float
    """The time of the others over that of the one, less 1."""
    num_bytes: float
    """What each of the others moved, in a step of REFERENCE_STEP_S or less."""
    error: float
    """Of the slowdown: its standard deviation, from how much the others vary among themselves."""


class Budget:
    """The bytes that slow a step down by what is aimed at, AIM * max_slowdown, as far as that is known.

    Steps vary by more than is allowed, a comparison therefore by several times as much, and a switch gives few of them.
    So a slowdown is taken to grow with the bytes, s a byte, and s is measured over many switches: it is the weighted
    median of slowdown / bytes, each weighted with its bytes (the line through the origin with the least sum of absolute
    distances), whose error is that of a median, sqrt(pi / 2) * error of a comparison / sqrt(sum of bytes ** 2).
    Before anything is known, start_bytes are believed to cost what is aimed at, give or take half of it (DOUBT). In
    units of that belief, aim / start_bytes, s is the mean of belief and measurement by their inverse variances, and

        s = (1 / DOUBT ** 2 + measured / error ** 2) / (1 / DOUBT ** 2 + 1 / error ** 2)        budget = start_bytes / s

    Noise has a large error, which leaves the budget near start_bytes. So has a budget that became too small to be
    measured, which brings it back. One comparison changes it by no more than MOST_GROWTH or MOST_SHRINKING, and it
    stays between floor_bytes, or start_bytes / SMALLEST_SHARE if that is more, and ceiling_bytes. max_slowdown: 0.05
    means 5 %.
    """

    def __init__(self, start_bytes: int, floor_bytes: int, ceiling_bytes: int, max_slowdown: float) -> None:
        self._floor, self._ceiling = floor_bytes, max(floor_bytes, ceiling_bytes)
        self._aim = max(AIM * max_slowdown, LEAST_AIM)
        self._known: deque[Comparison] = deque(maxlen=KEPT)
        self.begin_with(start_bytes)

    def begin_with(self, start_bytes: int) -> None:
        """As if nothing had been measured yet."""
        self._start = min(max(start_bytes, self._floor), self._ceiling)
        self._known.clear()
        self.bytes_per_step = self._start

    def observe(self, found: Comparison) -> None:
        """Of a switch; what was learnt in one is kept for the next."""
        if found.num_bytes < 1:
            return
        self._known.append(found)
        least = max(self._floor, self._start // SMALLEST_SHARE, int(self.bytes_per_step * MOST_SHRINKING))
        most = min(self._ceiling, math.ceil(self.bytes_per_step * MOST_GROWTH))
        cost = self._cost_of_start()
        self.bytes_per_step = min(max(int(self._start / cost) if cost * most > self._start else most, least), most)

    def _cost_of_start(self) -> float:
        """What start_bytes cost, over what is aimed at: belief and measurement by their weights."""
        believed = self._aim / self._start
        measured = _weighted_median([(x.slowdown / x.num_bytes / believed, x.num_bytes) for x in self._known])
        squares = sum(x.num_bytes**2 for x in self._known)
        error = math.sqrt(math.pi / 2 / squares) * median(x.error for x in self._known) / believed
        weight = DOUBT**2 / (DOUBT**2 + error**2)
        return 1 + weight * (measured - 1)

    def in_time(self, left_bytes: int, left_s: float, step_s: float) -> int:
        """The budget for the next step, raised if need be so that left_bytes are moved in half of left_s.

        A switch that misses its deadline has cost its slow-down for nothing. step_s: what a step takes.
        """
        steps = left_s / 2 / step_s if step_s > 0 else float("inf")
        usual = scaled(self.bytes_per_step, step_s)
        return min(max(usual, round(left_bytes / max(steps, 1.0))), scaled(self._ceiling, step_s))


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Of (value, weight), at least one: values up to it have half of the weight."""
    values = sorted(values)
    below = list(accumulate(weight for _, weight in values))
    return values[bisect_left(below, below[-1] / 2)][0]


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
