"""Metrics that are updated at every token, and so must cost next to nothing: one thread updates them, without locks.
Another thread may collect them; what it reads may be in the middle of an update."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Distribution(Collector):
    """A histogram without labels and locks, which can take several equal values in one call.

    buckets: upper bounds, ascending, without infinity.
    """

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.add(value, times, value * times)

    def add(self, value: float, times: int, total: float) -> None:
        """So many values of the bucket that `value` is in, and the sum of some, be it these or others."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class Total(Collector):
    """A counter without labels and locks."""

    def __init__(self, name: str, help_text: str) -> None:
        self._name = name
        self._help = help_text
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help, value=self._count)


class Rate(Collector):
    """A gauge: the rate per second over the last WINDOW_S whole seconds."""

    WINDOW_S = 5

    def __init__(self, name: str, help_text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._help = help_text
        self._clock = clock
        self._since = clock()
        self._counts: deque[list[int]] = deque()  # [second, count], ascending

    def add(self, count: int) -> None:
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += count
            return
        self._counts.append([second, count])
        while self._counts[0][0] < second - self.WINDOW_S:
            self._counts.popleft()

    def value(self) -> float:
        now = int(self._clock())
        first = max(now - self.WINDOW_S, int(self._since))
        if now == first:
            return 0.0
        counts = list(self._counts)  # a copy in one operation, since another thread may add meanwhile
        return sum(count for second, count in counts if first <= second < now) / (now - first)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._help, value=self.value())
