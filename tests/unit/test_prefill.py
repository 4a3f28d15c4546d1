"""How a step's room for prompts is dealt out, alone and in a scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.scheduler.prefill import in_turn, spread
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=12)


def test_in_turn_the_first_gets_all_it_needs() -> None:
    assert in_turn([5, 9, 4], 8) == [5, 3, 0]
    assert in_turn([5, 9, 4], 0) == [0, 0, 0]
    assert in_turn([], 8) == []


@pytest.mark.parametrize(
    ("need", "owner", "room", "tokens"),
    [
        ([90, 90], [0, 1], 20, [10, 10]),
        ([90, 90, 4], [0, 0, 1], 20, [16, 0, 4]),  # what one owner does not need goes to the other
        ([4, 90, 90], [0, 0, 1], 20, [4, 6, 10]),
        ([90, 3, 90], [2, 1, 0], 20, [9, 3, 8]),
        ([7, 7, 7], [2, 1, 0], 2, [1, 1, 0]),  # less than one for each owner: senior ones first
    ],
)
def test_spread(need: list[int], owner: list[int], room: int, tokens: list[int]) -> None:
    found = spread(need, owner, room)
    assert sorted(found) == sorted(tokens) and sum(found) == min(room, sum(need))
    by_owner = np.bincount(owner, found, 3)
    assert np.abs(by_owner - np.bincount(owner, tokens, 3)).max() <= 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PROMPTS, st.integers(0, 200))
def test_spread_is_as_even_as_can_be(prompts: list[tuple[int, int]], room: int) -> None:
    need, owner = [n for n, _ in prompts], [r for _, r in prompts]
    tokens = spread(need, owner, room)
    assert sum(tokens) == min(room, sum(need)), "room is left though somebody waits"
    assert all(0 <= got <= wanted for got, wanted in zip(tokens, need, strict=True))
    if need and room:
        assert tokens[0] >= 1, "the most senior prompt does not go on"
    demand, got = np.bincount(owner, need, 6), np.bincount(owner, tokens, 6)
    for rank in range(6):
        if got[rank] < demand[rank]:
            assert got.max() <= got[rank] + 1, "a rank got more than another that could have had it"
        mine = [(t, n) for t, n, r in zip(tokens, need, owner, strict=True) if r == rank]
        unfinished = [i for i, (t, n) in enumerate(mine) if t < n]
        assert not unfinished or all(t == 0 for t, _ in mine[unfinished[0] + 1 :]), "a junior prompt went first"


def _chunks(c: CheckedScheduler) -> list[dict[int, int]]:
    """By plan: prompt tokens by seed."""
    out = []
    for plan in c.plans:
        first = np.cumsum(plan.count) - plan.count
        rows = zip(plan.slot.tolist(), plan.count.tolist(), plan.token[first].tolist(), strict=True)
        out.append({c.ranks.seed(slot): count for slot, count, token in rows if token >= 0})
    return out


def _two_prompts(layout: Layout) -> list[list[int]]:
    c = CheckedScheduler((40, 40), layout=layout, max_batch_tokens=24, max_running=4)
    long, short = request("long", 60, 2), request("short", 30, 2)
    c.add(long, short)
    c.run()
    assert c.outputs.tokens["long"] == expected_tokens(long)
    assert c.outputs.tokens["short"] == expected_tokens(short)
    return [[chunk.get(r.seed, 0) for r in (long, short)] for chunk in _chunks(c)]


def test_in_data_parallel_two_ranks_compute_two_prompts_at_once() -> None:
    assert _two_prompts(Layout.DP)[:4] == [[12, 12], [12, 12], [18, 6], [18, 0]]


@pytest.mark.parametrize("layout", [Layout.TP, Layout.CP, Layout.DOP])
def test_elsewhere_all_ranks_compute_one_prompt_after_the_other(layout: Layout) -> None:
    assert _two_prompts(layout)[:4] == [[24, 0], [24, 0], [12, 12], [0, 18]]


def test_a_prompt_that_arrives_later_is_computed_beside_a_long_one_of_another_rank() -> None:
    """The long prompt alone could fill every step."""
    c = CheckedScheduler((100, 100), layout=Layout.DP, max_batch_tokens=24, max_running=4)
    c.add(request("long", 300, 2))
    c.step()
    c.add(request("late", 12, 2))
    c.step()
    assert [list(chunk.values()) for chunk in _chunks(c)] == [[24], [12, 12]]
    c.run()


def test_a_prompt_waits_while_its_rank_has_its_share_of_prompts() -> None:
    """Only rank 0 has room for it, and has more to compute than the step takes."""
    c = CheckedScheduler((100, 4), layout=Layout.DP, max_batch_tokens=24, max_running=4)
    c.add(request("long", 100, 2))
    c.step()
    c.add(request("late", 20, 2))
    c.step()
    assert c.scheduler.num_waiting == 1 and c.scheduler.num_running == 1
    c.run()
