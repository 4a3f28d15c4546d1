"""A switch moves between ranks what its target lacks, and not a byte more.

The minimum is worked out here from the placements alone: which ranks must hold a row at the end, less those that had it
at the beginning or computed it themselves.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.layout.switch import Record
from splash_trt.plan import Plan
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

PAIRS = list(itertools.permutations(Layout, 2))
PAGE = 4
ROW_BYTES = 64
ITEMSIZE = 4


def where(layout: Layout, home: int, position: int, num_ranks: int) -> set[int]:
    """Ranks that hold a row."""
    if layout is Layout.TP:
        return set(range(num_ranks))
    return {(home + position // PAGE) % num_ranks} if layout is Layout.CP else {home}


def computed_by(plan: Plan, row: int, position: int, num_ranks: int) -> set[int]:
    if plan.layout in (Layout.TP, Layout.DOP):
        return set(range(num_ranks))
    home = int(plan.home[row])
    if plan.layout is Layout.CP and not plan.absorbed[row]:
        return {(home + position // PAGE) % num_ranks}
    return {home}


def least_rows(plans: list[Plan], begin: int, end: int, num_ranks: int) -> int:
    """Rows to be sent for a switch that begins before plan `begin` and whose first plan of the new layout is `end`.

    Steps count from 1 as plans do. Every request of plan `end` has run since before `begin`: its rows below the first
    position of `begin`'s plan must come from where they are; later ones are also where they were computed.
    """
    first, last = plans[begin - 1], plans[end - 1]
    homes = dict(zip(last.slot.tolist(), last.home.tolist(), strict=True))
    assert set(first.slot.tolist()) == set(homes), "requests came or went"
    total = 0
    for row, slot in enumerate(first.slot.tolist()):
        for position in range(int(first.start[row])):
            have = where(first.layout, int(first.home[row]), position, num_ranks)
            total += len(where(last.layout, homes[slot], position, num_ranks) - have)
    for plan in plans[begin - 1 : end - 1]:
        for row, slot in enumerate(plan.slot.tolist()):
            for position in range(int(plan.start[row]), int(plan.start[row] + plan.count[row])):
                have = where(plan.layout, int(plan.home[row]), position, num_ranks)
                have |= computed_by(plan, row, position, num_ranks)
                total += len(where(last.layout, homes[slot], position, num_ranks) - have)
    return total


def switched(
    before: Layout,
    after: Layout,
    *,
    num_ranks: int = 4,
    budget: int = 1 << 20,
    move: tuple[str, ...] = (),
    prompts: tuple[int, ...] = (1, 4, 5, 11, 16, 30),
    absorbed_tokens: int = 1,
) -> tuple[CheckedScheduler, Record, int, int]:
    """Running requests of many lengths, and a switch; (…, its record, its first plan, the new layout's first plan)."""
    c = CheckedScheduler(
        (200,) * num_ranks,
        full_pages=(190,) * num_ranks,
        heads=(2, 1, 3, 1)[:num_ranks],
        layout=before,
        layouts=tuple(Layout),
        max_batch_tokens=64,
        migration_bytes=budget,
        absorbed_tokens=absorbed_tokens,
    )
    requests = [request(f"r{i}", n, 90) for i, n in enumerate(prompts)]
    c.add(*requests)
    for _ in range(6):
        c.step()
    owners = {}
    for name in move:
        home = c.scheduler.directory[name].placement.home
        owners[name] = (home + 1) % num_ranks
    begin, epoch = len(c.plans) + 1, c.switcher.epoch
    c.scheduler.switch(after, "test", owners=owners)
    while c.switcher.epoch == epoch:
        c.step()
        assert len(c.plans) < 90
    (record,) = c.switcher.records
    end = next(plan.step for plan in c.plans if plan.epoch == epoch + 1)
    assert c.plans[end - 1].layout is after
    for name, rank in owners.items():
        assert c.scheduler.directory[name].placement.home == rank
    c.run()
    c.settle()
    for r in requests:
        assert c.outputs.tokens[r.id] == expected_tokens(r)
    return c, record, begin, end


def check_minimal(c: CheckedScheduler, record: Record, begin: int, end: int) -> None:
    num_ranks = c.config.num_ranks
    least = least_rows(c.plans, begin, end, num_ranks)
    traffic = c.traffic[begin - 1 : end - 1]
    moved = sum(int(t.rows.sum() - np.trace(t.rows) + t.new_rows.sum()) for t in traffic)
    assert moved == least
    told = record.bytes_between_ranks
    assert told["pages"] + told["new_rows"] == least * ROW_BYTES
    assert not any(t.new_rows.any() or t.rows.any() or t.weights.any() for t in c.traffic[end - 1 :])


def check_weights(c: CheckedScheduler, record: Record, begin: int, end: int, before: Layout, after: Layout) -> None:
    """SHARD → FULL: all of the other ranks' heads, each once. Anything else: none."""
    num_ranks = c.config.num_ranks
    comes_in = SPECS[before].residency is Residency.SHARD and SPECS[after].residency is Residency.FULL
    parts: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for plan in c.plans[begin - 1 : end - 1]:
        for source, target, tensor, first, last in plan.weights.tolist():
            parts.setdefault((source, target, tensor), []).append((first, last))
    wanted = {
        (source, target, tensor): numbers * c.sizes.heads[source]
        for source, target in itertools.permutations(range(num_ranks), 2)
        for tensor, numbers in enumerate(c.sizes.head_numbers)
    }
    assert set(parts) == (set(wanted) if comes_in else set())
    for key, intervals in parts.items():
        edges = [edge for interval in sorted(intervals) for edge in interval]
        assert edges[0] == 0 and edges[-1] == wanted[key] and edges[1:-1:2] == edges[2::2]
    assert record.bytes_between_ranks["weights"] == (sum(wanted.values()) * ITEMSIZE if comes_in else 0)


@pytest.mark.parametrize("budget", [1, 64 * PAGE * 4, 1 << 20])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_bytes_are_minimal(before: Layout, after: Layout, budget: int) -> None:
    found = switched(before, after, budget=budget)
    check_minimal(*found)
    check_weights(*found, before, after)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_bytes_are_minimal_on_fewer_ranks(before: Layout, after: Layout, num_ranks: int) -> None:
    found = switched(before, after, num_ranks=num_ranks, budget=2000, absorbed_tokens=3)
    check_minimal(*found)
    check_weights(*found, before, after)
    if num_ranks == 1:
        assert not any(found[1].bytes_between_ranks.values())


@pytest.mark.parametrize("layout", [Layout.DP, Layout.DOP])
@pytest.mark.parametrize("budget", [1, 1 << 20])
@pytest.mark.parametrize("move", [("r5",), ("r0", "r2", "r5")])
def test_owners_move_with_their_rows_alone(layout: Layout, budget: int, move: tuple[str, ...]) -> None:
    c, record, begin, end = switched(layout, layout, budget=budget, move=move)
    check_minimal(c, record, begin, end)
    check_weights(c, record, begin, end, layout, layout)
    pages = sum(t.rows.sum() for t in c.traffic[begin - 1 : end - 1])
    assert pages >= sum({"r0": 1, "r2": 5, "r5": 30}[name] for name in move)


@pytest.mark.parametrize(("before", "after"), [(Layout.DP, Layout.DOP), (Layout.DOP, Layout.DP)])
def test_between_dp_and_dop_no_row_moves(before: Layout, after: Layout) -> None:
    c, record, begin, end = switched(before, after)
    assert record.bytes_between_ranks["pages"] == record.bytes_between_ranks["new_rows"] == 0
    assert not any(t.rows.any() for t in c.traffic) and record.bytes_inside_ranks == 0


@pytest.mark.parametrize("after", [Layout.DP, Layout.CP, Layout.DOP])
def test_from_tp_no_row_moves(after: Layout) -> None:
    c, record, begin, end = switched(Layout.TP, after)
    assert record.bytes_between_ranks["pages"] == record.bytes_between_ranks["new_rows"] == 0
    assert not any(t.rows.any() for t in c.traffic)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_long_prompt_that_is_computed_meanwhile_costs_no_more(before: Layout, after: Layout) -> None:
    """Its chunks are written under both placements as they come."""
    c = CheckedScheduler(
        (80,) * 3, layout=before, layouts=tuple(Layout), max_batch_tokens=8, migration_bytes=192, max_running=4
    )
    requests = [request("long", 70, 5), request("short", 3, 40)]
    c.add(*requests)
    for _ in range(4):
        c.step()
    begin = len(c.plans) + 1
    c.scheduler.switch(after, "test")
    c.settle()
    end = next(plan.step for plan in c.plans if plan.epoch == 1)
    if set(c.plans[begin - 1].slot.tolist()) == set(c.plans[end - 1].slot.tolist()) == {0, 1}:
        check_minimal(c, c.switcher.records[0], begin, end)
    c.run()
    for r in requests:
        assert c.outputs.tokens[r.id] == expected_tokens(r)
