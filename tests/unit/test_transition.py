"""What a switch would take, from sums, against what migration/diff.py lists page by page."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.cache.placement import Placement
from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind, Residency
from splash_trt.migration.diff import Sizes, page_moves, weight_moves
from splash_trt.migration.targets import follow
from splash_trt.scheduler import transition
from splash_trt.scheduler.meter import Meter

PAGE = 4
PAIRS = list(itertools.permutations(Layout, 2))


def sizes_of(num_ranks: int) -> Sizes:
    return Sizes(
        page_tokens=PAGE,
        row_bytes=10,
        itemsize=2,
        heads=tuple(3 if rank == 0 else 2 for rank in range(num_ranks)),
        head_numbers=(5, 7),
        pages={
            Residency.SHARD: (40,) * num_ranks,
            Residency.FULL: tuple(30 if rank == 0 else 20 for rank in range(num_ranks)),
        },
    )


def listed(source: Layout, target: Layout, pages: list[tuple[int, int]], sizes: Sizes) -> transition.Traffic:
    """By the moves themselves; pages: (pages, home) of each request, full to the last row."""
    n = len(sizes.heads)
    sent, received = np.zeros(n), np.zeros(n)
    for count, home in pages:
        here = Placement(SPECS[source].placement, home)
        there = follow(here, SPECS[target].placement, home)
        for move in page_moves(here, there, 0, count, n):
            sent[move.source] += sizes.page_bytes
            received[move.target] += sizes.page_bytes
    for heads in weight_moves(SPECS[source].residency, SPECS[target].residency, sizes):
        sent[heads.source] += (heads.end - heads.begin) * sizes.itemsize
        received[heads.target] += (heads.end - heads.begin) * sizes.itemsize
    return transition.Traffic(sent=sent, received=received)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_sums_are_those_of_the_moves(source: Layout, target: Layout, num_ranks: int) -> None:
    """Requests of a multiple of N pages, whose stripes are even."""
    sizes = sizes_of(num_ranks)
    pages = [(2 * num_ranks, 0), (3 * num_ranks, num_ranks - 1), (num_ranks, 0)]
    rows = np.zeros(num_ranks)
    for count, home in pages:
        rows[home] += count * PAGE
    expected = listed(source, target, pages, sizes)
    found = transition.traffic(source, target, rows, sizes)
    # A replica can be sent from any holder; the diff lets the first one send, the sums speak of all evenly.
    striped_out = SPECS[source].placement is PlacementKind.STRIPED
    assert found.sent.sum() == pytest.approx(expected.sent.sum())
    assert found.received == pytest.approx(expected.received)
    if not striped_out:
        assert found.sent == pytest.approx(expected.sent)


def test_moved_owners() -> None:
    rows, home = np.array([10, 20, 30]), np.array([0, 0, 1])
    found = transition.owner_traffic(rows, home, np.array([0, 1, 1]), 2, 5)
    assert found.sent.tolist() == [100, 0] and found.received.tolist() == [0, 100]
    assert found.busiest == 100 and found.both_ways == 100


def test_way_station_only_where_replicas_take_the_heads_room() -> None:
    sizes = sizes_of(2)
    assert transition.needs_way_station(Layout.TP, Layout.DP, np.array([31, 31]), sizes)
    assert not transition.needs_way_station(Layout.TP, Layout.DP, np.array([20, 20]), sizes)
    assert not transition.needs_way_station(Layout.TP, Layout.DOP, np.array([40, 40]), sizes)
    assert not transition.needs_way_station(Layout.DOP, Layout.DP, np.array([31, 31]), sizes)


def test_pages_leave_the_top_only_for_heads() -> None:
    sizes = sizes_of(2)
    assert transition.compacted_pages(Layout.TP, Layout.DP, np.array([20, 20]), sizes) == 10
    assert transition.compacted_pages(Layout.DP, Layout.TP, np.array([20, 20]), sizes) == 0
    assert transition.compacted_pages(Layout.TP, Layout.DOP, np.array([20, 20]), sizes) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.integers(100, 10_000))
def test_steps_are_those_of_a_budget_and_the_still_ones_among_them(num_bytes: int, budget: int) -> None:
    meter, left, steps = Meter(), num_bytes, 0
    meter.begin()
    while left > 0:
        left -= 0 if meter.wants_still() else budget
        steps += 1
    assert transition.steps_for(num_bytes, budget) == steps
