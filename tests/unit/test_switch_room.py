"""Switches of a server that is full: by way of DOP, after waiting, after compaction, or not at all, and it says why."""

from __future__ import annotations

import random

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.layout.switch import State
from splash_trt.request import Request
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens


def finished(c: CheckedScheduler, requests: list[Request]) -> None:
    c.run()
    c.settle()
    c.scheduler.check_idle()
    for r in requests:
        assert c.outputs.tokens[r.id] == expected_tokens(r, limit=c.limit(r))


def outcomes(c: CheckedScheduler) -> list[tuple[str, str, str]]:
    return [(r.source, r.target, r.outcome) for r in c.switcher.records]


@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_a_full_tp_with_a_queue_reaches_dp_by_way_of_dop(budget: int) -> None:
    """30 replicated pages do not fit beside all heads (20 pages); as 10 on each of three ranks they do."""
    c = CheckedScheduler(
        (30,) * 3, full_pages=(20,) * 3, layouts=tuple(Layout), migration_bytes=budget, max_running=8
    )
    requests = [request(f"r{i:02d}", 12, 10) for i in range(14)]
    c.add(*requests)
    while c.scheduler.directory.free_pages().max() > 3:
        c.step()
    assert c.scheduler.num_waiting
    c.scheduler.switch(Layout.DP, "queue")
    c.settle()
    assert c.scheduler.layout is Layout.DP
    assert outcomes(c) == [("tp", "dop", "committed"), ("dop", "dp", "committed")]
    assert "make room" in c.switcher.records[0].why and c.switcher.records[1].why == "queue"
    finished(c, requests)


def test_a_second_request_for_the_way_station_or_its_goal_begins_nothing_new() -> None:
    c = CheckedScheduler((30,) * 3, full_pages=(20,) * 3, layouts=tuple(Layout), migration_bytes=1, max_running=12)
    requests = [request(f"r{i:02d}", 12, 30) for i in range(10)]
    c.add(*requests)
    for _ in range(12):
        c.step()
    c.scheduler.switch(Layout.CP, "queue")
    c.step()
    c.scheduler.switch(Layout.CP, "again")
    c.step()
    assert len(c.switcher.records) == 1
    c.scheduler.switch(Layout.DOP, "no further")
    c.settle()
    assert outcomes(c) == [("tp", "dop", "committed")]
    finished(c, requests)


@pytest.mark.parametrize("seed", range(8))
def test_pages_that_live_at_random_leave_the_top(seed: int) -> None:
    """60 % of the small layout's pages live anywhere in the arena; TP → DP compacts them and needs no way station."""
    rng = random.Random(seed)
    c = CheckedScheduler(
        (100,) * 2, full_pages=(60,) * 2, layouts=tuple(Layout), max_running=40, max_batch_tokens=400, page_tokens=4
    )
    requests = [request(f"r{i:02d}", rng.randrange(4, 12), 60) for i in range(28)]
    c.add(*requests)
    for _ in range(4):
        c.step()
    order = rng.sample(requests, len(requests))
    while c.scheduler.directory.live_pages().max() > 36:
        c.cancel(order.pop().id)
    c.step()
    top = max(int(c.scheduler.directory[name].table.max()) for name in c.scheduler.directory)
    assert top >= 60
    before = c.preemptions
    c.scheduler.switch(Layout.DP, "test")
    c.settle()
    assert outcomes(c) == [("tp", "dp", "committed")] and c.preemptions == before
    assert c.switcher.records[0].bytes_inside_ranks > 0
    assert c.scheduler.directory.limits().tolist() == [60, 60]
    finished(c, order)


def without_room(hold: float = 0.0) -> tuple[CheckedScheduler, list[Request]]:
    """Owned pages of two ranks that are too many to be replicated: 8 + 8 against 10."""
    c = CheckedScheduler((10, 10), layout=Layout.DOP, layouts=tuple(Layout), switch_hold_s=hold)
    requests = [request(f"r{i}", 14, 14) for i in range(4)]
    c.add(*requests)
    for _ in range(4):
        c.step()
    return c, requests


def test_without_room_the_reason_names_rank_and_shortfall_and_serving_goes_on() -> None:
    c, requests = without_room()
    c.scheduler.switch(Layout.TP, "test")
    need = sum(c.scheduler.directory[r.id].num_pages for r in requests)
    c.step()
    (record,) = c.switcher.records
    assert record.outcome == f"aborted: no room: rank 0 lacks {need + 1 - 10} pages"
    c.settle()
    assert c.scheduler.layout is Layout.DOP and record.ended
    late = request("late", 3, 3)
    c.add(late)
    finished(c, [*requests, late])
    c.scheduler.switch(Layout.TP, "now there is room")
    last = request("last", 9, 9)
    c.add(last)
    c.settle()
    assert c.scheduler.layout is Layout.TP
    finished(c, [last])


def test_a_switch_waits_for_room_and_lets_nobody_in_meanwhile() -> None:
    c, requests = without_room(hold=100.0)
    c.scheduler.switch(Layout.TP, "test")
    late = request("late", 3, 3)
    c.add(late)
    while c.switcher.state in (State.STEADY, State.PREPARING):
        plan = c.step()
        admitted = plan is not None and late.seed in plan.sampling["seed"]
        assert not admitted or c.switcher.state is not State.PREPARING
    c.settle()
    assert outcomes(c) == [("dop", "tp", "committed")]
    assert c.outputs.finish
    finished(c, [*requests, late])


def test_held_admissions_resume_when_the_switch_gives_up() -> None:
    c, requests = without_room(hold=4.0)
    c.scheduler.switch(Layout.TP, "test")
    late = request("late", 3, 3)
    c.add(late)
    for step in range(12):
        plan = c.step(now=float(step))
        admitted = plan is not None and late.seed in plan.sampling["seed"]
        assert not admitted or step >= 4
    c.run()
    assert outcomes(c)[0][2].startswith("aborted: no room: rank 0 lacks")
    finished(c, [*requests, late])


def test_a_running_request_that_lacks_a_page_ends_the_switch_not_another_request() -> None:
    """Second copies take what the decodes need: the copies go."""
    c = CheckedScheduler((12, 12), layout=Layout.DOP, layouts=tuple(Layout), migration_bytes=1, max_running=4)
    requests = [request(f"r{i}", 6, 16) for i in range(4)]
    c.add(*requests)
    for _ in range(3):
        c.step()
    c.scheduler.switch(Layout.TP, "test")
    c.run()
    (record,) = c.switcher.records
    assert record.outcome.startswith("aborted: no room: rank") and "running request" in record.outcome
    assert c.preemptions == 0
    finished(c, requests)


@pytest.mark.parametrize("sent_weights", [False, True])
def test_the_room_of_heads_that_will_not_come_goes_to_a_running_request(sent_weights: bool) -> None:
    """The limit is down for the other ranks' heads; a decode needs a page above it."""
    c = CheckedScheduler(
        (24, 24),
        full_pages=(10, 10),
        layout=Layout.DOP,
        layouts=tuple(Layout),
        migration_bytes=1,
        max_running=4,
        heads=(8, 8),
    )
    requests = [request(f"r{i}", 6, 30) for i in range(4)]
    c.add(*requests)
    for _ in range(3):
        c.step()
    c.scheduler.switch(Layout.DP, "test")
    if not sent_weights:
        for name in ("r0", "r1"):
            assert c.scheduler.directory[name].num_pages <= 4
    c.run()
    outcome = outcomes(c)[0][2]
    assert outcome.startswith("aborted: no room: rank") and "running request" in outcome
    assert c.preemptions == 0
    finished(c, requests)


def test_an_abort_that_frees_nothing_is_not_tried() -> None:
    """TP → DOP has no second copies: when TP is full a request is preempted, and the switch goes on."""
    c = CheckedScheduler((8, 8), layouts=(Layout.TP, Layout.DOP), plans_in_flight=2, max_running=4)
    requests = [request(f"r{i}", 6, 18) for i in range(3)]
    c.add(*requests)
    while c.scheduler.directory.free_pages().max() > 0:
        c.step()
    c.scheduler.switch(Layout.DOP, "test")
    c.settle()
    assert outcomes(c) == [("tp", "dop", "committed")]
    finished(c, requests)


def test_uneven_ranks_get_what_they_can_hold() -> None:
    """TP → DP with 6 and 20 pages for 15: dealt out evenly they would not fit."""
    c = CheckedScheduler((26, 26), full_pages=(6, 20), layouts=tuple(Layout), max_running=8, max_batch_tokens=64)
    requests = [request(f"r{i}", 10, 10) for i in range(5)]
    c.add(*requests)
    c.step()
    c.scheduler.switch(Layout.DP, "test")
    c.settle()
    assert c.scheduler.num_running == 5
    assert outcomes(c) == [("tp", "dop", "committed"), ("dop", "dp", "committed")]
    assert c.scheduler.running_by_rank.tolist() == [1, 4]
    finished(c, requests)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_leaving_pages_are_not_given_to_second_placements(plans_in_flight: int) -> None:
    c = CheckedScheduler(
        (12, 12), layout=Layout.CP, layouts=tuple(Layout), plans_in_flight=plans_in_flight, switch_hold_s=50.0
    )
    first, second = request("first", 30, 8), request("second", 10, 20)
    c.add(first, second)
    for _ in range(3):
        c.step()
    c.cancel("first")
    c.scheduler.switch(Layout.TP, "test")
    c.settle()
    assert outcomes(c) == [("cp", "tp", "committed")]
    finished(c, [second])
    assert (np.array(c.scheduler.directory.free_pages()) == 12).all()
