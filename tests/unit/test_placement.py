"""Every page has exactly the homes that its placement says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement, num_pages
from splash_trt.layout.spec import PlacementKind
from splash_trt.scheduler.admission import RankLoads, place
from splash_trt.scheduler.slots import Slots

RUNS = settings(deadline=None, derandomize=True)
KINDS = list(PlacementKind)


def homes(kind: PlacementKind, home: int, page: int, num_ranks: int) -> set[int]:
    """The ranks of one page, from the definitions of the three placements."""
    if kind is PlacementKind.REPLICATED:
        return set(range(num_ranks))
    if kind is PlacementKind.OWNED:
        return {home}
    return {(home + page) % num_ranks}


CASES = st.integers(1, 7).flatmap(  # kind, home, first page, pages, ranks
    lambda n: st.tuples(
        st.sampled_from(KINDS), st.integers(0, n - 1), st.integers(0, 20), st.integers(0, 30), st.just(n)
    )
)


@RUNS
@given(CASES)
def test_holders_and_counts_follow_the_definition(case: tuple[PlacementKind, int, int, int, int]) -> None:
    kind, home, first, count, num_ranks = case
    placement = Placement(kind, home)
    expected = [homes(kind, home, first + i, num_ranks) for i in range(count)]
    held = placement.holders(first, count, num_ranks)
    assert held.shape == (count, num_ranks) and held.dtype == np.bool_
    assert [set(np.flatnonzero(row).tolist()) for row in held] == expected
    assert [list(placement.ranks(first + i, num_ranks)) for i in range(count)] == [sorted(page) for page in expected]
    per_rank = placement.pages_per_rank(count, num_ranks, first_page=first)
    assert per_rank.tolist() == [sum(rank in page for page in expected) for rank in range(num_ranks)]


@RUNS
@given(CASES)
def test_pages_added_in_two_parts_are_those_added_at_once(case: tuple[PlacementKind, int, int, int, int]) -> None:
    kind, home, first, count, num_ranks = case
    placement = Placement(kind, home)
    whole = placement.pages_per_rank(first + count, num_ranks)
    parts = placement.pages_per_rank(first, num_ranks) + placement.pages_per_rank(count, num_ranks, first_page=first)
    assert whole.tolist() == parts.tolist()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_of_tokens(tokens: int, pages: int) -> None:
    assert num_pages(tokens, 64) == pages
    assert num_pages(tokens, 1) == tokens


@RUNS
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 12),
    st.data(),
)
def test_place_finds_room_exactly_where_there_is_some(
    kind: PlacementKind, limits: list[int], now: int, more: int, data: st.DataObject
) -> None:
    """With nothing running, a request is placed if and only if some home has room now and in the end."""
    directory = Directory(limits)
    for rank in range(len(limits)):  # some pages are held by others, for example as they leave
        directory.open(f"held{rank}", Placement(PlacementKind.OWNED, rank))
        directory.grow(f"held{rank}", data.draw(st.integers(0, limits[rank])))
    free = directory.free_pages().tolist()

    def fits(home: int) -> bool:
        def need(count: int, rank: int) -> int:
            return sum(rank in homes(kind, home, page, len(limits)) for page in range(count))

        return all(
            need(now, rank) <= free[rank] and need(now + more, rank) <= limits[rank] for rank in range(len(limits))
        )

    nothing_runs = RankLoads(Slots(1), np.zeros(len(limits), np.int64), lambda generated: generated)
    placed = place(directory, kind, now, now + more, nothing_runs, lambda placement: None)
    found = None if placed is None else placed[0]
    assert (found is not None) == any(fits(home) for home in range(len(limits)))
    if found is not None:
        assert found.kind is kind and fits(found.home)
