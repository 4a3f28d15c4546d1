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
SMALLEST_SHARE = 16  # a budget is at least start_bytes / 16: with less a switch only takes longer
AIM = 0.7  # share of the allowed slowdown to aim at; the rest covers errors and what a switch costs besides its bytes
DOUBT = 0.5  # standard deviation of the prior belief about what start_bytes cost, relative to the aim
LEAST_AIM = 1e-4  # a smaller slowdown cannot be told from noise
KEPT = 256  # comparisons that are remembered
MOST_GROWTH, MOST_SHRINKING = 1.25, 0.5  # the budget changes by no more than these factors with each comparison


def scaled(num_bytes: int, step_s: float) -> int:
    """A budget for a step that takes step_s."""
    return round(num_bytes * max(1.0, step_s / REFERENCE_STEP_S))


class Comparison(NamedTuple):
    """A step of a switch that moved nothing, against the steps around it that moved something (see meter.py)."""

    slowdown: float
    """The time of the moving steps over the time of the still one, less 1."""
    num_bytes: float
    """What each moving step moved, scaled to a step of REFERENCE_STEP_S or less."""
    error: float
    """Standard deviation of `slowdown`, estimated from how much the moving steps vary among themselves."""


class Budget:
    """The bytes that each rank may move in a step of a switch, so that the step slows down by the aim, AIM *
    max_slowdown (0.05 means 5 %). `bytes_per_step` is the present estimate.

    Measuring is hard: steps vary by more than the slowdown that is allowed, a comparison of steps varies by several
    times as much, and one switch gives few comparisons. So the model is simple, slowdown = s * bytes, and s is measured
    over many switches. The measurement is the weighted median of slowdown / bytes over all comparisons, each weighted
    with its bytes: the line through the origin with the least sum of absolute distances. Its error is that of a median,
    sqrt(pi / 2) * error of a comparison / sqrt(sum of bytes ** 2).

    Before the first measurement there is a belief: start_bytes cost the aim, with a standard deviation of DOUBT times
    the aim. Belief and measurement are averaged by their inverse variances. In units of the belief (aim / start_bytes):

        s = (1 / DOUBT ** 2 + measured / error ** 2) / (1 / DOUBT ** 2 + 1 / error ** 2)        budget = start_bytes / s

    A noisy measurement has a large error and leaves the budget near start_bytes. So does a measurement under a budget
    that became too small to be measured, which brings the budget back up. The budget changes by no more than
    MOST_GROWTH or MOST_SHRINKING with each comparison, is at most ceiling_bytes, and is at least floor_bytes or
    start_bytes / SMALLEST_SHARE, whichever is more.
    """

    def __init__(self, start_bytes: int, floor_bytes: int, ceiling_bytes: int, max_slowdown: float) -> None:
        self._floor, self._ceiling = floor_bytes, max(floor_bytes, ceiling_bytes)
        self._aim = max(AIM * max_slowdown, LEAST_AIM)
        self._known: deque[Comparison] = deque(maxlen=KEPT)
        self.begin_with(start_bytes)

    def begin_with(self, start_bytes: int) -> None:
        """Begin anew with this budget, as if nothing had been measured yet."""
        self._start = min(max(start_bytes, self._floor), self._ceiling)
        self._known.clear()
        self.bytes_per_step = self._start

    def observe(self, found: Comparison) -> None:
        """Take in a comparison. What one switch teaches is kept for the next."""
        if found.num_bytes < 1:
            return
        self._known.append(found)
        least = max(self._floor, self._start // SMALLEST_SHARE, int(self.bytes_per_step * MOST_SHRINKING))
        most = min(self._ceiling, math.ceil(self.bytes_per_step * MOST_GROWTH))
        cost = self._cost_of_start()
        self.bytes_per_step = min(max(int(self._start / cost) if cost * most > self._start else most, least), most)

    def _cost_of_start(self) -> float:
        """What start_bytes cost relative to the aim: `s` of the class's formula."""
        believed = self._aim / self._start
        measured = _weighted_median([(x.slowdown / x.num_bytes / believed, x.num_bytes) for x in self._known])
        squares = sum(x.num_bytes**2 for x in self._known)
        error = math.sqrt(math.pi / 2 / squares) * median(x.error for x in self._known) / believed
        weight = DOUBT**2 / (DOUBT**2 + error**2)
        return 1 + weight * (measured - 1)

    def in_time(self, left_bytes: int, left_s: float, step_s: float) -> int:
        """The budget for the next step, which takes about step_s. It is raised where left_bytes would otherwise not be
        moved within half of left_s, the time to the deadline: a switch that misses it has slowed steps for nothing."""
        steps = left_s / 2 / step_s if step_s > 0 else float("inf")
        usual = scaled(self.bytes_per_step, step_s)
        return min(max(usual, round(left_bytes / max(steps, 1.0))), scaled(self._ceiling, step_s))


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """The weighted median of (value, weight) pairs, at least one: values up to it have half of all weight."""
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
        """No rank may send any more, or no rank may receive any more."""
        return max(self._sent) <= 0 or max(self._received) <= 0
