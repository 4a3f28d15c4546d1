"""What requests still have before them, and how fast they come."""

from __future__ import annotations

import numpy as np
import pytest

from splash_trt.scheduler.forecast import PRIOR_WEIGHT, Lengths, Rate


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


def test_rate() -> None:
    rate = Rate()
    assert rate.per_s(5.0) == 0
    for i in range(400):
        rate.add(i / 4)
    assert rate.per_s(100.0) == pytest.approx(4, rel=0.15)
    assert rate.per_s(500.0) == 0


def test_a_burst_is_no_rate() -> None:
    rate = Rate()
    for i in range(1000):
        rate.add(0.99 + i / 10_000)
    assert rate.per_s(2.0) == 0
    for i in range(10):
        rate.add(3.0 + i)
    assert rate.per_s(12.9) == pytest.approx(1, rel=0.15)
