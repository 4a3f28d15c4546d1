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


class Arrivals:
    """Requests that came in the last SECONDS, without the BURSTS fullest of these: what comes all at once says nothing
    of what will follow."""

    SECONDS = 30
    BURSTS = 2

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()  # second; in it: requests, tokens of their prompts, squares of these
        self._begin: int | None = None

    def add(self, now: float, prompt_tokens: int) -> None:
        """One arrived."""
        second = int(now)
        if self._begin is None:
            self._begin = second
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0, 0])
        last = self._seconds[-1]
        last[1] += 1
        last[2] += prompt_tokens
        last[3] += prompt_tokens**2
        self._forget(second)

    def rates(self, now: float) -> tuple[float, float, float]:
        """(requests per second, prompt tokens per second, tokens of the prompt that a prompt token belongs to)."""
        self._forget(int(now))
        kept = sorted(self._seconds, key=lambda s: (-s[1], s[2]))[self.BURSTS :]
        count, tokens, squares = (sum(s[field] for s in kept) for field in (1, 2, 3))
        # A server that has just begun has not seen so many seconds yet; a few are too few to tell a rate from chance.
        span = max(min(now - (self._begin or 0), self.SECONDS) - self.BURSTS, self.SECONDS / 3)
        return count / span, tokens / span, squares / tokens if tokens else 0.0

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self.SECONDS:
            self._seconds.popleft()


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
        self.arrivals = Arrivals()
        self.arrived_tokens = 0
        """Of all prompts so far."""

    def arrived(self, now: float, prompt_tokens: int) -> None:
        """A request came."""
        self.arrivals.add(now, prompt_tokens)
        self.arrived_tokens += prompt_tokens
