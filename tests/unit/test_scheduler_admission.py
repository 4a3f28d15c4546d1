"""Capacity and load: where requests go, and what a full rank stops."""

from __future__ import annotations

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.plan import Plan
from splash_trt.scheduler.admission import ExpectedOutput, output_left
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

OWNED = [Layout.DP, Layout.DOP]


def _homes(plans: list[Plan], num_ranks: int) -> list[int]:
    """Rows of new requests by home."""
    homes = np.zeros(num_ranks, np.int64)
    for plan in plans:
        new = np.isin(plan.slot, plan.sampling["slot"])
        homes += np.bincount(plan.home[new], minlength=num_ranks)
    return homes.tolist()


@pytest.mark.parametrize("layout", [Layout.DP, Layout.DOP, Layout.CP])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_burst_of_queued_requests_is_dealt_out_evenly(layout: Layout, num_ranks: int) -> None:
    c = CheckedScheduler((40,) * num_ranks, layout=layout, max_running=64, max_batch_tokens=256)
    c.add(*[request(f"r{i:02d}", 4, 6) for i in range(12 * num_ranks)])
    c.step()
    assert _homes(c.plans, num_ranks) == [12] * num_ranks
    c.run()


@pytest.mark.parametrize("layout", [Layout.DP, Layout.DOP, Layout.CP])
def test_a_burst_spread_over_many_steps_is_dealt_out_evenly(layout: Layout) -> None:
    """Only one prompt fits a step, so that each admission sees the load of those before."""
    c = CheckedScheduler((40,) * 4, layout=layout, max_running=8, max_batch_tokens=12)
    c.add(*[request(f"r{i}", 8, 30) for i in range(8)])
    for _ in range(20):
        c.step()
    assert _homes(c.plans, 4) == [2] * 4
    c.run()


@pytest.mark.parametrize("layout", OWNED)
def test_ranks_with_some_pages_more_do_not_get_all_requests(layout: Layout) -> None:
    c = CheckedScheduler((100, 80, 80, 80), layout=layout, max_running=16, max_batch_tokens=256)
    c.add(*[request(f"r{i:02d}", 4, 6) for i in range(16)])
    c.step()
    homes = _homes(c.plans, 4)
    assert max(homes) - min(homes) <= 2, homes
    c.run()


@pytest.mark.parametrize("layout", OWNED)
def test_one_full_rank_does_not_stop_the_others(layout: Layout) -> None:
    c = CheckedScheduler((10, 10), layout=layout)
    big = request("big", 36, 3)
    c.add(big)
    c.step()
    free = c.scheduler.directory.free_pages().tolist()
    c.add(*[request(f"r{i}", 4, 4) for i in range(4)])
    c.step()
    c.step()
    assert min(free) == 1 and c.scheduler.num_waiting == 0
    c.run()
    assert c.outputs.tokens["big"] == expected_tokens(big)


@pytest.mark.parametrize("layout", OWNED)
def test_a_request_larger_than_one_rank_is_refused_though_all_together_have_room(layout: Layout) -> None:
    c = CheckedScheduler((5, 6, 5), layout=layout)
    with pytest.raises(ValueError, match="prompt: 24 tokens.*at most 24 tokens of one request"):
        c.add(request("a", 24, 4))
    c.scheduler.check_idle()


def test_striping_takes_what_no_single_rank_could() -> None:
    c = CheckedScheduler((5, 6, 5), layout=Layout.CP)
    r = request("a", 58, 6)
    c.add(r)
    c.run()
    assert c.request_tokens == 64 and c.outputs.tokens["a"] == expected_tokens(r) and c.outputs.error["a"] is None


def test_only_the_largest_rank_takes_a_request_that_fits_no_other() -> None:
    c = CheckedScheduler((5, 6, 5), layout=Layout.DP)
    small = [request(f"r{i}", 6, 9) for i in range(3)]
    r = request("long", 4, 20)
    c.add(*small, r)
    c.run()
    assert c.outputs.tokens["long"] == expected_tokens(r) and c.outputs.error["long"] is None
    seeds: dict[int, int] = {}  # by slot
    homes = set()
    for plan in c.plans:
        seeds |= dict(zip(plan.sampling["slot"].tolist(), plan.sampling["seed"].tolist(), strict=True))
        homes |= {h for s, h in zip(plan.slot.tolist(), plan.home.tolist(), strict=True) if seeds[s] == r.seed}
    assert homes == {1}


def test_replicas_hold_what_the_smallest_rank_holds() -> None:
    c = CheckedScheduler((5, 9, 7), layout=Layout.TP)
    with pytest.raises(ValueError, match="at most 20 tokens"):
        c.add(request("a", 20, 1))
    r = request("b", 16, 4)
    c.add(r)
    c.run()
    assert c.outputs.tokens["b"] == expected_tokens(r) and c.outputs.error["b"] is None


@pytest.mark.parametrize("layout", list(Layout))
def test_fullness_is_seen_anew_each_step(layout: Layout) -> None:
    """A rank that was nearly full, all of whose requests were cancelled, takes requests again."""
    c = CheckedScheduler((6, 6), layout=layout)
    for turn in range(5):
        names = [f"{turn}-{i}" for i in range(4)]
        c.add(*[request(name, 11, 9) for name in names])
        for _ in range(3):
            c.step()
        assert c.scheduler.num_running >= 1
        for name in names:
            c.cancel(name)
    last = request("last", 20, 4)
    c.add(last)
    c.run()
    assert c.outputs.tokens["last"] == expected_tokens(last)


@pytest.mark.parametrize("layout", list(Layout))
def test_running_requests_of_ample_room_all_get_a_token_in_every_step(layout: Layout) -> None:
    c = CheckedScheduler((64,) * 3, layout=layout, max_running=8, max_batch_tokens=40)
    c.add(*[request(f"r{i}", 5, 20) for i in range(8)])
    c.run()
    rows = [p.num_rows for p in c.plans]
    assert rows == [8] * 20 and c.preemptions == 0


def test_a_long_prompt_leaves_room_for_decodes() -> None:
    """Prefill takes what decodes leave of a step, not the other way round."""
    c = CheckedScheduler((200,), max_running=4, max_batch_tokens=8)
    c.add(*[request(f"r{i}", 2, 30) for i in range(3)])
    c.step()
    c.step()
    c.add(request("long", 100, 1))
    for _ in range(10):
        plan = c.step()
        assert plan is not None and plan.num_rows == 4 and plan.num_tokens == 8
    c.run()


# Load decides


def _loaded(expected_output: ExpectedOutput | None = None) -> tuple[CheckedScheduler, np.ndarray]:
    """Rank 0 runs a long request when 64 short ones arrive at once; how many of these each rank got."""
    c = CheckedScheduler(
        (400,) * 4, layout=Layout.DP, max_running=80, max_batch_tokens=1024, expected_output=expected_output
    )
    c.add(request("a", 200, 400), *[request(f"b{i}", 4, 1) for i in range(3)])
    c.step()
    c.run_until(lambda: all(f"b{i}" in c.outputs.finish for i in range(3)))
    c.add(*[request(f"r{i:02d}", 14, 1) for i in range(64)])
    first = len(c.plans)
    c.step()
    return c, np.array(_homes(c.plans[first:], 4))


def test_a_burst_goes_round_a_rank_that_is_loaded_already() -> None:
    c, homes = _loaded()
    assert homes.sum() == 64 and 0 < homes[0] < homes[1:].min() - 3
    assert homes[1:].max() - homes[1:].min() <= 1
    assert c.scheduler.num_waiting == 0


def test_what_is_still_to_come_counts_as_much_as_what_is_held() -> None:
    """Believed to end at once, the long request weighs less; believed to go on to its limit, more."""

    def share(length: float) -> int:
        return int(_loaded(lambda generated: length - generated)[1][0])

    by_what_ended = _loaded()[1][0]
    assert share(0.0) > by_what_ended > share(1e9)


@pytest.mark.parametrize(
    ("expected", "left"),
    [(lambda generated: 8.0 - generated, [8, 0, 0]), (lambda generated: generated + 2.0, [2, 0, 4])],
)
def test_expected_output_is_kept_to_the_limits(expected: ExpectedOutput, left: list[float]) -> None:
    assert output_left(expected, np.array([0, 9, 20]), np.array([10, 0, 4])).tolist() == left


def test_equal_loads_go_to_the_lower_rank() -> None:
    c = CheckedScheduler((40,) * 3, layout=Layout.DP)
    c.add(*[request(name, 4, 8) for name in ("a", "b", "c", "d")])
    c.step()
    assert c.plans[0].home.tolist() == [0, 1, 2, 0]


def test_no_owner_is_without_prompts_while_some_wait() -> None:
    """Prompts of all lengths, so that the rank with the least to do often has prompts enough for now."""
    rng = np.random.default_rng(5)
    c = CheckedScheduler((400,) * 4, layout=Layout.DP, max_running=64, max_batch_tokens=64)
    c.add(*[request(f"r{i:02d}", int(n), 6) for i, n in enumerate(rng.integers(3, 120, 48))])
    while c.scheduler.num_waiting:
        c.step()
        plan = c.plans[-1]
        if c.scheduler.num_waiting:
            assert len(np.unique(plan.home[plan.count > 1])) == 4, plan.step
    c.run()
