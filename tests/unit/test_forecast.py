"""What requests still have before them, and how fast they come."""

from __future__ import annotations

import numpy as np
import pytest

from splash_trt.scheduler.forecast import PRIOR_WEIGHT, Arrivals, Lengths


def told(*ended: int) -> Lengths:
    lengths = Lengths(first_guess=100)
    for length in ended:
        lengths.ended(length)
    return lengths


def test_without_any_a_request_lasts_as_long_again() -> None:
    assert told().left(np.array([0, 50, 400])).tolist() == [100, 100, 400]


def test_the_mean_residual_life() -> None:
    lengths = told(*[10] * 50, *[1000] * 50)
    left = lengths.left(np.array([0, 20]))
    assert left[0] == pytest.approx((50 * 10 + 50 * 1000 + PRIOR_WEIGHT * 100) / (100 + PRIOR_WEIGHT))
    assert left[1] == pytest.approx((50 * 980 + PRIOR_WEIGHT * 100) / (50 + PRIOR_WEIGHT))


def test_one_that_outlives_all_others_falls_back_to_the_rule() -> None:
    assert told(*[10] * 200).left(np.array([5000]))[0] == 5000


def test_exponential_lengths_are_memoryless() -> None:
    rng = np.random.default_rng(0)
    lengths = told(*rng.exponential(300, 500).astype(int).tolist())
    left = lengths.left(np.array([0, 150, 300]))
    assert (np.abs(left - 300) < 60).all()


def test_the_latest_lengths_count() -> None:
    lengths = told(*[1000] * 600, *[10] * 600)
    assert lengths.mean() < 12


def test_arrivals() -> None:
    arrivals = Arrivals()
    assert arrivals.rates(5.0) == (0, 0, 0)
    for i in range(400):
        arrivals.add(i / 4, 100)
    per_s, tokens_s, prompt = arrivals.rates(99.9)
    assert per_s == pytest.approx(4, rel=0.1) and tokens_s == pytest.approx(400, rel=0.1) and prompt == 100
    assert arrivals.rates(500.0) == (0, 0, 0)


def test_a_burst_is_no_rate() -> None:
    arrivals = Arrivals()
    for i in range(1000):
        arrivals.add(100.99 + i / 10_000, 500)
    assert arrivals.rates(102.0) == (0, 0, 0)
    for i in range(20):
        arrivals.add(103.0 + i, 30_000 if i % 10 == 0 else 300)
    per_s, tokens_s, prompt = arrivals.rates(125.0)
    assert per_s == pytest.approx(20 / 23, rel=0.2)
    assert prompt > 25_000, "a token's prompt, not a request's"
    assert tokens_s == pytest.approx((2 * 30_000 + 18 * 300) / 23, rel=0.2)
