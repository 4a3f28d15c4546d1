"""Compaction: which pages go where, when room or budget end."""

from __future__ import annotations

import numpy as np
import pytest

from splash_trt.cache.compaction import compact
from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement
from splash_trt.config import Layout
from splash_trt.layout.spec import PlacementKind
from tests.oracles.checked_scheduler import CheckedScheduler, compact_pages, request
from tests.oracles.simulated_ranks import expected_tokens


def moves(directory: Directory, rank: int, limit: int, budget: int, *, step: int) -> list[tuple[str, int, int, int]]:
    done = compact(directory, rank, limit, budget, step=step)
    return [(m.request_id, m.page_index, m.old, m.new) for m in done]


def _high() -> Directory:
    """10 pages on one rank: request b on 4 … 7; 0 … 3 leave with plan 1."""
    directory = Directory([10])
    for name in ("a", "b"):
        directory.open(name, Placement(PlacementKind.OWNED))
        directory.grow(name, 4)
    directory.close("a", step=1)
    return directory


def test_pages_go_to_the_lowest_free_ones_in_order() -> None:
    directory = _high()
    directory.completed(1)
    assert moves(directory, 0, 6, 9, step=2) == [("b", 2, 6, 0), ("b", 3, 7, 1)]
    assert directory["b"].table[:, 0].tolist() == [4, 5, 0, 1]
    directory.check()


def test_the_budget_is_kept_and_a_second_call_goes_on() -> None:
    directory = _high()
    directory.completed(1)
    assert moves(directory, 0, 4, 3, step=2) == [("b", 0, 4, 0), ("b", 1, 5, 1), ("b", 2, 6, 2)]
    assert moves(directory, 0, 4, 3, step=2) == [("b", 3, 7, 3)]
    assert moves(directory, 0, 4, 3, step=2) == []


def test_leaving_pages_are_no_room() -> None:
    directory = _high()
    assert moves(directory, 0, 4, 9, step=2) == []
    directory.check()


def test_the_old_page_is_free_only_after_the_plan_of_the_copy() -> None:
    directory = _high()
    directory.completed(1)
    compact(directory, 0, 4, 1, step=2)
    directory.completed(1)
    assert directory.free_pages().tolist() == [5] and directory.leaving_pages().tolist() == [1]
    directory.completed(2)
    assert directory.free_pages().tolist() == [6]


def test_only_the_named_rank_moves() -> None:
    directory = Directory([8, 8])
    for name in ("a", "b"):
        directory.open(name, Placement(PlacementKind.REPLICATED))
        directory.grow(name, 3)
    directory.close("a", step=0)
    directory.completed(0)
    compact(directory, 1, 3, 9, step=1)
    assert directory["b"].table.tolist() == [[3, 0], [4, 1], [5, 2]]
    directory.check()


def test_sixty_percent_of_the_pages_at_random_are_brought_below_the_overlay() -> None:
    """As SHARD → FULL needs it: the limit falls, live pages leave the top under a budget."""
    directory = Directory([100])
    for i in range(100):
        directory.open(f"r{i:02d}", Placement(PlacementKind.OWNED))
        directory.grow(f"r{i:02d}", 1)
    for i in np.random.default_rng(0).permutation(100)[:40]:
        directory.close(f"r{i:02d}", step=0)
    directory.completed(0)
    pool = directory.pools[0]
    pool.set_limit(65)
    step, calls = 0, 0
    while pool.held_from(65):
        step += 1
        calls += bool(compact(directory, 0, 65, 4, step=step))
        directory.completed(step)
        directory.check()
        assert step < 100
    assert pool.num_held == 60 and pool.num_free == 5 and calls >= 5


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_compacting_between_steps_changes_no_token(layout: Layout, plans_in_flight: int) -> None:
    c = CheckedScheduler((30, 24), layout=layout, plans_in_flight=plans_in_flight)
    early = [request(f"early{i}", 9, 4) for i in range(4)]
    late = [request(f"late{i}", 7, 25) for i in range(4)]
    c.add(*early, *late)
    moved = 0
    while not c.idle:
        for rank in range(2):
            moved += compact_pages(c.scheduler, rank, limit=10, budget_pages=2)
        c.step()
    c.scheduler.check_idle()
    assert moved > 2
    for r in early + late:
        assert c.outputs.tokens[r.id] == expected_tokens(r)


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_request_cancelled_with_its_copies_not_yet_sent(plans_in_flight: int) -> None:
    """Its new pages may go to another request in the very plan that copies into them."""
    c = CheckedScheduler((12,), plans_in_flight=plans_in_flight, max_running=3)
    first, victim, heir = request("first", 12, 1), request("victim", 12, 20), request("heir", 12, 9, seed=3)
    c.add(first, victim)
    while "first" not in c.outputs.finish:
        c.step()
    c.step()
    assert compact_pages(c.scheduler, 0, limit=3, budget_pages=9) > 0
    c.cancel("victim")
    c.add(heir)
    c.run()
    assert c.outputs.tokens["heir"] == expected_tokens(heir)
