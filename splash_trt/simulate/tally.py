"""Collects a simulated run's results step by step, and evaluates them hundreds of steps at a time, which is faster.

R requests. Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FLUSH_STEPS = 512
GAP_BINS_PER_DECADE = 500  # neighbouring bins are 0.46 % apart
GAP_LOWEST_S = 1e-6
GAP_BINS = 10 * GAP_BINS_PER_DECADE


class Tally:
    """When requests got their first and their last token, and the times between two tokens of a request (gaps)."""

    def __init__(self, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> None:
        """The arrays [R] are read when tokens come, so entries may still be filled in as requests arrive."""
        self._prompt = prompt_tokens
        self._output = output_tokens
        count = len(prompt_tokens)
        self.arrived_s = np.full(count, np.nan)
        self.first_s = np.full(count, np.nan)
        self.last_s = np.full(count, np.nan)
        self._latest_s = np.full(count, np.nan)
        self._gaps = np.zeros(GAP_BINS, np.int64)
        self.longest_gap_s = 0.0
        self._steps: list[tuple[float, np.ndarray, np.ndarray]] = []

    def step(self, end_s: float, numbers: np.ndarray, ends: np.ndarray) -> None:
        """A step gave each of `numbers` [W] the token at position `ends` [W] of prompt and output."""
        self._steps.append((end_s, numbers, ends))
        if len(self._steps) == FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Evaluate the steps that have been collected."""
        if not self._steps:
            return
        times = np.repeat([s[0] for s in self._steps], [len(s[1]) for s in self._steps])
        numbers = np.concatenate([s[1] for s in self._steps])
        ends = np.concatenate([s[2] for s in self._steps])
        self._steps = []
        index = ends - self._prompt[numbers]
        real = index < self._output[numbers]  # a plan that was in flight when the last token came makes one too many
        order = np.flatnonzero(real)
        order = order[np.argsort(numbers[order], kind="stable")]
        numbers, index, times = numbers[order], index[order], times[order]
        first, last = index == 0, index == self._output[numbers] - 1
        self.first_s[numbers[first]] = times[first]
        self.last_s[numbers[last]] = times[last]
        if not len(numbers):
            return
        begins = np.append(True, numbers[1:] != numbers[:-1])
        before = np.append(np.nan, times[:-1])
        before[begins] = self._latest_s[numbers[begins]]
        closing = np.append(begins[1:], True)
        self._latest_s[numbers[closing]] = times[closing]
        gaps = (times - before)[~first]
        if len(gaps):
            self.longest_gap_s = max(self.longest_gap_s, float(gaps.max()))
            place = np.log10(np.maximum(gaps, GAP_LOWEST_S) / GAP_LOWEST_S) * GAP_BINS_PER_DECADE
            self._gaps += np.bincount(np.minimum(place.astype(np.int64), GAP_BINS - 1), minlength=GAP_BINS)

    def gap_s(self, percent: float) -> float:
        """A percentile of the times between two tokens of a request, within a bin's width; 0 if there were none."""
        total = int(self._gaps.sum())
        if not total:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._gaps), max(1.0, percent / 100 * total)))
        return GAP_LOWEST_S * 10 ** ((place + 0.5) / GAP_BINS_PER_DECADE)


MAX_SAMPLES = 4096


@dataclass
class Series:
    """The course of a run, for plots: a sample every `every` steps. When there are MAX_SAMPLES, every other is dropped.

    Parallel lists; `output` and `prompt` are tokens computed so far.
    """

    every: int = 1
    time_s: list[float] = field(default_factory=list)
    layout: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    cache: list[float] = field(default_factory=list)
    """Share of all pages that requests hold."""

    def add(
        self, time_s: float, layout: int, output: int, prompt: int, running: int, waiting: int, cache: float
    ) -> None:
        self.time_s.append(time_s)
        self.layout.append(layout)
        self.output.append(output)
        self.prompt.append(prompt)
        self.running.append(running)
        self.waiting.append(waiting)
        self.cache.append(cache)
        if len(self.time_s) >= MAX_SAMPLES:
            self.every *= 2
            for column in (self.time_s, self.layout, self.output, self.prompt, self.running, self.waiting, self.cache):
                del column[1::2]
