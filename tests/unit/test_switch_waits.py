"""Nobody waits for a switch: every running request gets its token in every step, and no step moves more than it may.

(The budget itself is checked by CheckedScheduler in every plan.)
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.layout.switch import State
from splash_trt.plan import LAST_SAMPLED, Plan
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

PAIRS = list(itertools.permutations(Layout, 2))
ROW = 64
PAGE = 4 * ROW


def decoding(plan: Plan) -> set[int]:
    """Slots that get a token from the one sampled before."""
    first = np.cumsum(plan.count) - plan.count
    return set(plan.slot[plan.token[first] == LAST_SAMPLED].tolist())


def running(layout: Layout, budget: int, **options: int) -> tuple[CheckedScheduler, list]:
    """Six requests that decode, with ample room."""
    c = CheckedScheduler(
        (150,) * 3,
        full_pages=(140,) * 3,
        layout=layout,
        layouts=tuple(Layout),
        max_batch_tokens=40,
        migration_bytes=budget,
        **options,
    )
    requests = [request(f"r{i}", n, 60) for i, n in enumerate((1, 4, 5, 9, 12))]
    c.add(*requests)
    for _ in range(4):
        c.step()
    assert decoding(c.plans[-1]) == set(range(5))
    return c, requests


@pytest.mark.parametrize("budget", [1, 3 * ROW, 3 * PAGE, 1 << 40])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_running_request_gets_its_token_in_every_step(before: Layout, after: Layout, budget: int) -> None:
    c, requests = running(before, budget, plans_in_flight=1 + budget % 2)
    c.scheduler.switch(after, "test")
    states = set()
    while c.switcher.busy:
        plan = c.step()
        assert plan is not None and decoding(plan) == set(range(5)), c.switcher.record
        states.add(c.switcher.state)
    assert c.switcher.records[0].outcome == "committed" and c.scheduler.layout is after
    assert State.RETIRING in states
    c.run()
    for r in requests:
        assert c.outputs.tokens[r.id] == expected_tokens(r)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_arrivals_are_let_in_while_rows_move(before: Layout, after: Layout) -> None:
    """A short one even ends before the commit."""
    c, requests = running(before, 1)
    c.scheduler.switch(after, "test")
    late = [request("late0", 7, 3), request("late1", 3, 30)]
    c.step()
    state = c.switcher.state
    c.add(*late)
    c.step()
    assert {r.seed for r in late} <= set(c.plans[-1].sampling["seed"].tolist())
    if state is State.MIGRATING:
        assert c.plans[-1].epoch == 0
    c.settle()
    c.run()
    assert c.switcher.records[0].outcome == "committed"
    for r in requests + late:
        assert c.outputs.tokens[r.id] == expected_tokens(r)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_backlog_moves_at_the_pace_of_the_budget(before: Layout, after: Layout) -> None:
    """Steps with moves are about bytes of the busiest rank over the budget, whatever comes in meanwhile."""
    budget = 3 * PAGE
    c, _ = running(before, budget)
    c.scheduler.switch(after, "test")
    begin = len(c.traffic)
    c.settle()
    traffic = c.traffic[begin:]
    rows = sum(t.rows - np.diag(np.diag(t.rows)) for t in traffic) * ROW + sum(t.weights for t in traffic) * 4
    busiest = max(int(rows.sum(axis=0).max()), int(rows.sum(axis=1).max()))
    moving = sum(bool((t.rows.sum() - np.trace(t.rows)) or t.weights.sum()) for t in traffic)
    assert moving <= 2 * -(-busiest // budget) + 2
    assert sum(c.switcher.records[0].steps_in.values()) <= moving + 6


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_steps_that_copy_no_more_than_new_rows_are_still_ones(
    before: Layout, after: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a switch out of a layout that spreads tokens would have none to hold the others against."""
    c, _ = running(before, 2 * ROW)
    told: list[tuple[Plan, int]] = []
    meter = c.switcher._meter
    step = meter.step
    monkeypatch.setattr(meter, "step", lambda plan, result, n: (told.append((plan, n)), step(plan, result, n))[1])
    c.scheduler.switch(after, "test")
    c.settle()
    during = [(plan, num_bytes) for plan, num_bytes in told if plan.attempt]
    assert during and all((num_bytes > 0) == bool(len(p.moves) or len(p.weights)) for p, num_bytes in during)
    moving = [num_bytes > 0 for _, num_bytes in during]
    if sum(moving) > 10:
        gaps = np.diff(np.flatnonzero(moving))
        assert set(gaps.tolist()) <= {1, 2} and (gaps == 2).sum() == (sum(moving) + 3) // 7
        assert any(len(p.late_moves) for p, n in during if not n) or before not in (Layout.DP, Layout.CP)


def test_an_idle_server_switches_without_a_request() -> None:
    c = CheckedScheduler((9, 9), full_pages=(5, 5), layouts=tuple(Layout), migration_bytes=100)
    for layout in (Layout.DP, Layout.TP, Layout.CP, Layout.DOP, Layout.DP):
        c.scheduler.switch(layout, "test")
        c.settle(100)
        assert c.scheduler.layout is layout and c.idle
        limit = 5 if layout in (Layout.DP, Layout.CP) else 9
        assert c.scheduler.directory.limits().tolist() == [limit] * 2
        c.scheduler.check_idle()
    r = request("r", 9, 9)
    c.add(r)
    c.run()
    assert c.outputs.tokens["r"] == expected_tokens(r)


@pytest.mark.parametrize("after", [Layout.DP, Layout.CP])
def test_a_burst_during_a_switch_is_spread_over_the_owners_to_be(after: Layout) -> None:
    """Replicas share their pages with the owned copies: free pages do not tell who will own how much."""
    c, _ = running(Layout.TP, 1, max_running=16)
    c.scheduler.switch(after, "test")
    c.run_until(lambda: c.switcher.state in (State.MIGRATING, State.ARMED))
    c.add(*(request(f"late{i}", 4, 40) for i in range(9)))
    c.settle()
    assert c.scheduler.layout is after
    by_rank = c.scheduler.running_by_rank
    assert by_rank.sum() == 14 and by_rank.max() - by_rank.min() <= 3, by_rank
    c.run()
