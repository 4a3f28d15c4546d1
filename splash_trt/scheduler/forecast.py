"""Forecasts, since nobody tells in advance: how many tokens running requests will still generate, from the lengths of
requests that ended; how fast new ones will arrive; and which work will come again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from splash_trt.config import Layout

KEPT = 512  # so many of the latest lengths are remembered
SIZES = 40  # classes of prompt lengths, by powers of two; all longer prompts are in the last class
PRIOR_WEIGHT = 4.0  # the rule of thumb counts like so many observed lengths
ALIKE = 1.2  # prompt lengths that differ by a smaller factor are treated as one
ENOUGH = 4  # with so many lengths of requests with similar prompts, only these are used


class _Ended:
    """Output lengths of some requests that ended by themselves."""

    def __init__(self) -> None:
        self._latest = np.zeros(KEPT)
        self._count = 0  # of all that ended
        self._sorted = np.zeros(0)
        self._tail = np.zeros(1)  # [i]: sum of the sorted lengths from i on
        self._stale = False

    def __len__(self) -> int:
        return min(self._count, KEPT)

    def add(self, num_tokens: int) -> None:
        self._latest[self._count % KEPT] = num_tokens
        self._count += 1
        self._stale = True

    def left(self, generated: np.ndarray, first_guess: float) -> np.ndarray:
        if self._stale:
            self._sorted = np.sort(self._latest[: len(self)])
            self._tail = np.append(np.cumsum(self._sorted[::-1])[::-1], 0.0)
            self._stale = False
        first = np.searchsorted(self._sorted, generated, side="right")
        longer = len(self._sorted) - first
        thumb = np.maximum(generated, first_guess)
        return (self._tail[first] - longer * generated + PRIOR_WEIGHT * thumb) / (longer + PRIOR_WEIGHT)


class Lengths:
    """Output lengths of requests that ended by themselves; separately for prompts of about the same length, since
    documents get other answers than questions."""

    def __init__(self, first_guess: float = 128.0) -> None:
        self._first_guess = first_guess
        self._all = _Ended()
        self._like: dict[int, _Ended] = {}

    def ended(self, num_tokens: int, prompt_tokens: int) -> None:
        """A request with a prompt of prompt_tokens ended after num_tokens of output."""
        self._all.add(num_tokens)
        self._like.setdefault(_size(prompt_tokens), _Ended()).add(num_tokens)

    def left(self, generated: np.ndarray, prompt: np.ndarray | None = None) -> np.ndarray:
        """[R] expected tokens still to come of requests with prompts of `prompt` [R] tokens (None: of any) that have
        `generated` [R] so far, whatever their limits.

        This is the mean residual life: by how much those of the ended requests that got longer did so. Where there were
        few of these, it leans on a rule of thumb for heavy tails: a request that has lasted long will last about as
        long again (under a Pareto distribution with exponent 2 the mean residual life equals what has passed).
        """
        out = self._all.left(generated, self._first_guess)
        if prompt is not None and len(self._like) > 1:
            sizes = np.log2(np.maximum(prompt, 1)).astype(np.int64) // 2
            for size in set(sizes.tolist()) & self._like.keys():
                if len(ended := self._like[size]) >= ENOUGH:
                    alike = sizes == size
                    out[alike] = ended.left(generated[alike], self._first_guess)
        return out

    def mean(self, prompt: np.ndarray) -> float:
        """Expected output tokens of a request that has not begun, averaged over prompts of `prompt` [P] tokens; if
        there are none, of a request with any prompt."""
        found = self.left(np.zeros(len(prompt)), prompt) if len(prompt) else self.left(np.zeros(1))
        return float(found.mean())


def _size(prompt_tokens: int) -> int:
    return int(np.log2(max(prompt_tokens, 1))) // 2


Halves = tuple[tuple[float, float], ...]
"""Prompts in two classes, the shorter and the longer ones, each with about half of all prompt tokens. For each class:
(its share of the tokens, the length of the prompt that a token of it belongs to, on average). One class if all prompts
have about the same length."""


def halves(tokens: np.ndarray, squares: np.ndarray) -> Halves:
    """The classes, from sums over K groups of prompts of about the same length, by rising length: tokens [K] sums the
    prompts' lengths, squares [K] the squares of their lengths."""
    tokens, squares = tokens[tokens > 0], squares[tokens > 0]
    if not len(tokens):
        return ()
    total = float(tokens.sum())
    split = int(np.abs(np.cumsum(tokens) - total / 2).argmin()) + 1
    low, high = float(tokens[:split].sum()), float(tokens[split:].sum())
    short, long = float(squares[:split].sum()) / low, float(squares[split:].sum()) / max(high, 1.0)
    if long < ALIKE * short:
        return ((1.0, float(squares.sum()) / total),)
    return (low / total, short), (high / total, long)


@dataclass(frozen=True)
class Arriving:
    """What will arrive, if requests go on arriving as they have of late."""

    per_s: float
    """Requests per second."""
    tokens_s: float
    """Prompt tokens per second."""
    prompts: Halves
    most_tokens: float
    """The most prompt tokens that are expected to come: as many as have come so far, since what has lasted for some
    time is not expected to last for longer than that again."""


class Arrivals:
    """Rates of arrival, from the requests of the last SECONDS, for each class of prompt lengths by itself. A burst says
    nothing of what will follow it: the BURSTS seconds with the most requests count no more than the next one (but at
    least as one request). The longer nothing comes, measured by the usual gap, the less is expected to come."""

    SECONDS = 30
    BURSTS = 2
    ENDS = 0.15  # odds that a source of requests has ended rather than pauses for its usual gap

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._begin: int | None = None
        self._since: dict[int, int] = {}  # by size: since which second they have come, with no longer gap than SECONDS
        self._last: dict[int, int] = {}

    def add(self, now: float, prompt_tokens: int) -> None:
        """A request arrived."""
        second = int(now)
        if self._begin is None:
            self._begin = second
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(_Second(second))
        size = min(prompt_tokens.bit_length(), SIZES - 1)
        if second - self._last.get(size, -self.SECONDS - 1) > self.SECONDS:
            self._since[size] = second
        self._last[size] = second
        self._seconds[-1].sums[:, size] += 1.0, prompt_tokens, float(prompt_tokens) ** 2
        self._forget(second)

    def rates(self, now: float) -> Arriving:
        """At `now`, on the clock of `add`."""
        self._forget(int(now))
        if not self._seconds:
            return Arriving(0.0, 0.0, (), 0.0)
        # A server that has just begun has not seen so many seconds yet; a few are too few to tell a rate from chance.
        span = max(min(now - (self._begin or 0), self.SECONDS), self.SECONDS / 3)
        sums = np.array([s.sums for s in self._seconds])  # [seconds, 3, SIZES]
        sizes = np.flatnonzero(sums[:, 0].any(axis=0))  # of which some came: a few
        sums = sums[:, :, sizes]
        count, second = sums[:, 0], np.array([[s.second] for s in self._seconds])
        fullest = np.sort(count, axis=0)[-1 - self.BURSTS] if len(count) > self.BURSTS else 0.0
        counted = np.minimum(count, np.maximum(fullest, 1.0)) / np.maximum(count, 1.0)
        came = count > 0
        alive = self._alive(came.sum(0), np.where(came, second, second.min()).max(0), now, span)
        number, tokens, squares = (alive * (sums * counted[:, None]).sum(0)).tolist()
        lasted = (max(now - self._since[size], span) for size in sizes.tolist())
        most = sum(some * seconds for some, seconds in zip(tokens, lasted, strict=True)) / span
        return Arriving(sum(number) / span, sum(tokens) / span, halves(np.array(tokens), np.array(squares)), most)

    def _alive(self, seconds: np.ndarray, last: np.ndarray, now: float, span: float) -> np.ndarray:
        """[K]: for each class, the chance that its source still goes on. It had requests in `seconds` [K] different
        seconds, the last of them in second `last` [K]. By Bayes' rule, for a source whose requests come at random and
        which either goes on or has ended since the last one."""
        silent = np.maximum(now - last - 1.0, 0.0)
        return 1 / (1 + self.ENDS * np.expm1(np.minimum(silent * seconds / span, 50.0)))

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0].second <= second - self.SECONDS:
            self._seconds.popleft()


@dataclass
class _Second:
    second: int
    sums: np.ndarray = field(default_factory=lambda: np.zeros((3, SIZES)))
    """Prompts, their tokens, and the squares of these, by how many bits a prompt's length has."""


class Past:
    """The work of about the last SPAN_S seconds of steps: how long it would have taken in each layout (`seconds`)."""

    SPAN_S = 30.0

    def __init__(self) -> None:
        self.seconds: dict[Layout, float] = {}
        self._squares = 0.0
        self._here = 0.0

    def add(self, here: Layout, step_s: dict[Layout, float], steps: int) -> None:
        """Add so many steps in layout `here`; step_s: the time of one of them in each layout."""
        fade = math.exp(-steps * step_s[here] / self.SPAN_S)
        for layout, value in step_s.items():
            self.seconds[layout] = self.seconds.get(layout, 0.0) * fade + steps * value
        self._here = self._here * fade + steps * step_s[here]
        self._squares = self._squares * fade + steps * step_s[here] ** 2

    @property
    def step_s(self) -> float:
        """The length of the step that a random moment of that time falls into, on average."""
        return self._squares / self._here if self._here else 0.0


class Outlook:
    """What to expect of a deployment's requests: their lengths and their arrivals."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self.arrivals = Arrivals()
        self.arrived_tokens = 0
        """Of all prompts so far."""

    def arrived(self, now: float, prompt_tokens: int) -> None:
        """A request came."""
        self.arrivals.add(now, prompt_tokens)
        self.arrived_tokens += prompt_tokens
