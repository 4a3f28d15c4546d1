"""The metrics that are updated at every token, against prometheus_client's own histogram and against plain counting."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from splash_trt.observe.series import Distribution, Rate

BUCKETS = (0.125, 0.5, 1, 2)


def text(*values: tuple[float, int], ours: bool) -> list[str]:
    registry = CollectorRegistry()
    if ours:
        distribution = Distribution("x", "An x", BUCKETS)
        registry.register(distribution)
        for value, times in values:
            distribution.observe(value, times)
    else:
        histogram = Histogram("x", "An x", buckets=BUCKETS, registry=registry)
        for value, times in values:
            for _ in range(times):
                histogram.observe(value)
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_distribution_is_a_histogram() -> None:
    chance = random.Random(1)
    values = [(chance.choice([*BUCKETS, 0.0, 0.25, 3.0, 1000.0]), chance.randint(1, 4)) for _ in range(50)]
    assert text(*values, ours=True) == text(*values, ours=False)
    assert text(ours=True) == text(ours=False)


def test_a_rate_is_that_of_the_last_whole_seconds() -> None:
    now = 100.25
    rate = Rate("r", "An r", lambda: now)
    assert rate.value() == 0
    rate.add(30)
    assert rate.value() == 0  # of a second that is not over
    now = 101.5
    rate.add(10)
    assert rate.value() == 30
    now = 102.0
    assert rate.value() == 20
    now = 105.5
    rate.add(1)
    assert rate.value() == 40 / 5
    now = 106.0
    assert rate.value() == 11 / 5  # the first second has gone
    now = 200.0
    assert rate.value() == 0
    for _ in range(1000):
        now += 0.5
        rate.add(2)
    assert rate.value() == 4 and len(rate._counts) <= rate.WINDOW_S + 1
