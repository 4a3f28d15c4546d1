"""What the running requests still have before them, from the lengths of those that ended: nobody tells in advance."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from splash_trt.config import Layout

KEPT = 512  # of the latest lengths
PRIOR_WEIGHT = 4.0  # lengths that the rule of thumb counts as


class Lengths:
    """Output lengths of requests that ended by themselves."""

    def __init__(self, first_guess: float = 128.0) -> None:
        self._ended: deque[int] = deque(maxlen=KEPT)
        self._first_guess = first_guess
        self._sorted = np.zeros(0)
        self._tail = np.zeros(1)  # [i]: sum of the sorted lengths from i on
        self._stale = False

    def ended(self, num_tokens: int) -> None:
        """A request ended after so many tokens of output."""
        self._ended.append(num_tokens)
        self._stale = True

    def left(self, generated: np.ndarray) -> np.ndarray:
        """[R] expected tokens still to come of requests that have `generated` [R] so far, whatever their limits.

        The mean residual life: of the ended ones that were longer, how much longer they were. Where few were, what
        counts is the rule for heavy tails that a request which lasted long will last about as long again (the mean
        residual life of a Pareto distribution with exponent 2 is what has passed).
        """
        if self._stale:
            self._sorted = np.sort(np.array(self._ended, np.float64))
            self._tail = np.append(np.cumsum(self._sorted[::-1])[::-1], 0.0)
            self._stale = False
        first = np.searchsorted(self._sorted, generated, side="right")
        longer = len(self._sorted) - first
        thumb = np.maximum(generated, self._first_guess)
        return (self._tail[first] - longer * generated + PRIOR_WEIGHT * thumb) / (longer + PRIOR_WEIGHT)

    def mean(self) -> float:
        """Expected output of a request that has not begun."""
        return float(self.left(np.zeros(1))[0])


class Rate:
    """Arrivals per second over the last SECONDS, without the BURSTS fullest of them: requests that come all at once say
    nothing of what will follow."""

    SECONDS = 12
    BURSTS = 2

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()  # (second, arrivals in it)

    def add(self, now: float, count: int = 1) -> None:
        """`count` requests arrived."""
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            count += self._counts.pop()[1]
        self._counts.append((second, count))
        self._forget(second)

    def per_s(self, now: float) -> float:
        self._forget(int(now))
        counts = sorted((count for _, count in self._counts), reverse=True)
        return sum(counts[self.BURSTS :]) / (self.SECONDS - self.BURSTS)

    def _forget(self, second: int) -> None:
        while self._counts and self._counts[0][0] <= second - self.SECONDS:
            self._counts.popleft()


class Past:
    """The work of the last SPAN_S seconds or so of steps, and what it would have taken in each layout."""

    SPAN_S = 30.0

    def __init__(self) -> None:
        self.seconds: dict[Layout, float] = {}
        self._squares = 0.0
        self._here = 0.0

    def add(self, here: Layout, step_s: dict[Layout, float], steps: int) -> None:
        """So many steps in layout `here`, each with its time in that and in others."""
        fade = math.exp(-steps * step_s[here] / self.SPAN_S)
        for layout, value in step_s.items():
            self.seconds[layout] = self.seconds.get(layout, 0.0) * fade + steps * value
        self._here = self._here * fade + steps * step_s[here]
        self._squares = self._squares * fade + steps * step_s[here] ** 2

    @property
    def step_s(self) -> float:
        """The step that a moment of that time fell into, on average."""
        return self._squares / self._here if self._here else 0.0


class Outlook:
    """What is known of a deployment's requests before they come, and while they run."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self.arrivals = Rate()
