"""Which requests change their owners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.scheduler.balance import EVEN, rebalanced


def test_even_ranks_are_left_alone() -> None:
    home = np.array([0, 1, 2, 3])
    assert np.array_equal(rebalanced(np.array([1.0, 1.02, 1.0, 1.0]), home, 4), home)


def test_a_crowded_rank_gives_half_away() -> None:
    home = rebalanced(np.ones(8), np.zeros(8, np.int64), 4)
    assert np.bincount(home, minlength=4).tolist() == [2, 2, 2, 2]


def test_one_large_request_stays_and_the_small_ones_leave() -> None:
    home = rebalanced(np.array([10.0, 1, 1, 1]), np.zeros(4, np.int64), 2)
    assert home.tolist() == [0, 1, 1, 1]


def test_a_lone_request_is_not_passed_around() -> None:
    assert rebalanced(np.array([5.0]), np.array([2]), 4).tolist() == [2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 3)), max_size=60))
def test_the_heaviest_rank_never_gets_heavier(requests: list[tuple[float, int]]) -> None:
    weight = np.array([w for w, _ in requests])
    home = np.array([h for _, h in requests], np.int64)
    after = rebalanced(weight, home, 4)
    before_load, after_load = np.bincount(home, weight, 4), np.bincount(after, weight, 4)
    assert after_load.max() <= before_load.max() * (1 + 1e-12)
    assert after_load.sum() == pytest.approx(before_load.sum())
    largest = weight.max(initial=0.0)
    assert after_load.max() - after_load.min() <= max(EVEN * after_load.mean(), largest) + 1e-9
