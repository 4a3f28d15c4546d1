"""The budget follows what bytes cost between its bounds; an allowance is never overdrawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.migration.budget import (
    AIM,
    DOUBT,
    MOST_GROWTH,
    MOST_SHRINKING,
    REFERENCE_STEP_S,
    SMALLEST_SHARE,
    Allowance,
    Budget,
    Comparison,
)


def told(budget: Budget, slowdown: float, *, times: int = 1, error: float = 0.0, num_bytes: float = 0.0) -> int:
    """The budget after so many comparisons, of steps that moved all that it allowed unless num_bytes says otherwise."""
    for _ in range(times):
        budget.observe(Comparison(slowdown, num_bytes or budget.bytes_per_step, error))
    return budget.bytes_per_step


@pytest.mark.parametrize(("start", "expected"), [(1, 100), (500, 500), (5000, 1000)])
def test_the_first_budget_lies_between_floor_and_ceiling(start: int, expected: int) -> None:
    assert Budget(start, 100, 1000, 0.05).bytes_per_step == expected


def test_a_floor_above_the_ceiling_wins() -> None:
    """One row must always fit, or nothing would ever move."""
    assert Budget(1, 5000, 1000, 0.05).bytes_per_step == 5000


def test_it_grows_while_steps_are_not_slower_up_to_the_ceiling() -> None:
    budget = Budget(400, 100, 1000, 0.05)
    assert told(budget, 0.0) == 400 * MOST_GROWTH
    assert told(budget, -0.2, times=5) == 1000


def test_it_shrinks_when_steps_are_slower_down_to_the_floor() -> None:
    budget = Budget(400, 100, 1000, 0.05)
    assert told(budget, 0.9) == 400 * MOST_SHRINKING
    assert told(budget, 0.9, times=5) == 100


def test_it_does_not_shrink_to_where_a_switch_would_hardly_move() -> None:
    budget = Budget(1 << 20, 1, 1 << 30, 0.05)
    assert told(budget, 100.0, times=50) == (1 << 20) // SMALLEST_SHARE


@pytest.mark.parametrize("cost", [0.35, 0.7, 1.3, 4.0])
def test_known_slowdowns_are_those_aimed_at(cost: float) -> None:
    """Of start_bytes, over what is aimed at. Without errors the budget is the one whose slowdown is that."""
    budget = Budget(1 << 20, 1, 1 << 30, 0.05)
    for _ in range(10):
        told(budget, cost * AIM * 0.05 * budget.bytes_per_step / (1 << 20))
    assert budget.bytes_per_step == pytest.approx((1 << 20) / cost, rel=1e-5)


def test_what_is_as_sure_as_the_belief_counts_half() -> None:
    """One comparison whose slope has an error of DOUBT, and says that start_bytes cost twice what is aimed at."""
    budget, aim = Budget(3000, 1, 1 << 30, 0.05), AIM * 0.05
    assert told(budget, 2 * aim, error=DOUBT * aim / np.sqrt(np.pi / 2)) == pytest.approx(3000 / 1.5, abs=1)


def test_one_outlier_among_many_does_not_count() -> None:
    budget, aim = Budget(400, 100, 1000, 0.05), AIM * 0.05
    told(budget, aim, times=5, num_bytes=400)
    before = budget.bytes_per_step
    assert told(budget, 1000.0, num_bytes=400) == before


def test_bytes_weigh_as_much_as_they_are() -> None:
    """What steps that moved next to nothing say of bytes is noise."""
    budget, aim = Budget(4000, 1, 100_000, 0.05), AIM * 0.05
    told(budget, aim, times=3, num_bytes=4000)
    assert told(budget, 0.5, times=30, num_bytes=10) == pytest.approx(4000, abs=1)


def test_steps_that_moved_nothing_say_nothing() -> None:
    budget = Budget(400, 100, 1000, 0.05)
    budget.observe(Comparison(9.0, 0, 0.0))
    assert budget.bytes_per_step == 400


def test_another_beginning_forgets_what_was_measured() -> None:
    budget = Budget(400, 100, 1000, 0.05)
    told(budget, 0.9, times=3)
    budget.begin_with(800)
    assert budget.bytes_per_step == 800
    assert told(budget, 0.0) == 1000


def test_no_slowdown_allowed_is_one_too_small_to_be_measured() -> None:
    budget = Budget(400, 1, 1000, 0.0)
    assert told(budget, 0.001, times=20) == 400 // SMALLEST_SHARE


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 1 << 30),
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 28),
    st.floats(0, 1000),
    st.lists(st.tuples(st.floats(-1, 1e6), st.floats(0, 1e10), st.floats(0, 1e6)), max_size=40),
)
def test_whatever_is_measured_it_stays_in_bounds_and_changes_by_steps(
    start: int, floor: int, ceiling: int, max_slowdown: float, found: list[tuple[float, float, float]]
) -> None:
    budget, again = (Budget(start, floor, ceiling, max_slowdown) for _ in range(2))
    for comparison in found:
        before = budget.bytes_per_step
        budget.observe(Comparison(*comparison))
        again.observe(Comparison(*comparison))
        now = budget.bytes_per_step
        assert floor <= now <= max(floor, ceiling)
        assert int(before * MOST_SHRINKING) <= now <= before * MOST_GROWTH + 1
        assert now == again.bytes_per_step, "the same measurements led elsewhere"


def test_a_step_moves_more_where_the_deadline_would_be_missed() -> None:
    budget, step_s = Budget(400, 100, 100_000, 0.05), REFERENCE_STEP_S
    assert budget.in_time(3_000, left_s=20 * step_s, step_s=step_s) == 400, "ten steps of 400 are enough"
    assert budget.in_time(8_000, left_s=20 * step_s, step_s=step_s) == 800
    assert budget.in_time(8_000, left_s=step_s / 10, step_s=step_s) == 8_000
    assert budget.in_time(8_000, left_s=-1.0, step_s=step_s) == 8_000
    assert budget.in_time(1 << 40, left_s=step_s, step_s=step_s) == 100_000
    assert budget.in_time(1 << 40, left_s=1.0, step_s=0.0) == 400, "nothing is known of steps yet"


def test_a_longer_step_hides_more() -> None:
    budget = Budget(400, 100, 1_000, 0.05)
    assert budget.in_time(10, left_s=1e6, step_s=REFERENCE_STEP_S / 2) == 400
    assert budget.in_time(10, left_s=1e6, step_s=REFERENCE_STEP_S * 3) == 1_200
    assert budget.in_time(1 << 40, left_s=0.0, step_s=REFERENCE_STEP_S * 3) == 3_000


def test_an_allowance_counts_what_each_rank_sends_and_receives() -> None:
    a = Allowance(100, 3)
    assert a.room(0, [1, 2], 10) == 5
    a.spend(0, [1, 2], 40)
    assert a.room(0, [1], 1) == 20 and a.room(0, [2], 1) == 20
    assert a.room(1, [0], 1) == 100 and a.room(2, [1], 1) == 60
    assert a.room(0, [], 1) == 0
    a.spend(2, [1], 60)
    assert a.room(2, [1], 1) == 0 and a.room(2, [0], 1) == 40
    assert not a.spent


def test_an_allowance_is_spent_when_nobody_can_send_or_nobody_can_receive() -> None:
    a = Allowance(10, 2)
    a.spend(0, [1], 10)
    assert not a.spent
    a.spend(1, [0], 10)
    assert a.spent


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 500), st.data())
def test_an_allowance_is_never_overdrawn(budget: int, data: st.DataObject) -> None:
    a, num_ranks = Allowance(budget, 4), 4
    sent, received = [0] * num_ranks, [0] * num_ranks
    for _ in range(12):
        source = data.draw(st.integers(0, 3))
        targets = data.draw(st.lists(st.sampled_from([r for r in range(4) if r != source]), unique=True))
        unit = data.draw(st.integers(1, 60))
        count = a.room(source, targets, unit)
        a.spend(source, targets, count * unit)
        sent[source] += count * unit * len(targets)
        for target in targets:
            received[target] += count * unit
    assert max(sent) <= budget and max(received) <= budget
