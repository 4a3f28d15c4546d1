"""Which second placement each running request gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind
from splash_trt.migration.targets import Holding, choose_targets, follow

REPLICATED, OWNED, STRIPED = PlacementKind.REPLICATED, PlacementKind.OWNED, PlacementKind.STRIPED
ROOMY = np.array([100, 100, 100])


def held(kind: PlacementKind, *pages: int, homes: tuple[int, ...] = (), final: int = 0) -> list[Holding]:
    return [
        Holding(f"r{i}", Placement(kind, homes[i] if homes else 0), n, max(n, final)) for i, n in enumerate(pages)
    ]


def homes(kind: PlacementKind, holdings: list[Holding], limits: np.ndarray = ROOMY, **owners: int) -> list[int]:
    found = choose_targets(kind, holdings, limits, owners)
    assert [target.kind for target in found] == [kind] * len(holdings)
    return [target.home for target in found]


def test_replicas_have_no_home() -> None:
    assert choose_targets(REPLICATED, held(OWNED, 3, 4, homes=(2, 1)), ROOMY, {}) == [Placement(REPLICATED)] * 2


@pytest.mark.parametrize("before", [OWNED, STRIPED])
@pytest.mark.parametrize("after", [OWNED, STRIPED])
def test_owners_and_homes_stay(before: PlacementKind, after: PlacementKind) -> None:
    assert homes(after, held(before, 5, 1, 9, homes=(2, 2, 1))) == [2, 2, 1]


def test_replicated_requests_are_dealt_out_the_largest_first() -> None:
    assert homes(OWNED, held(REPLICATED, 1, 8, 2, 5, 5)) == [2, 0, 1, 1, 2]
    assert homes(STRIPED, held(REPLICATED, 1, 1, 1, 1)) == [0, 1, 2, 0]


def test_a_wish_moves_one_request() -> None:
    assert homes(OWNED, held(OWNED, 5, 1, 9, homes=(2, 2, 1)), r1=0) == [2, 0, 1]
    assert homes(OWNED, held(REPLICATED, 5, 5, 5), r0=2, r1=2) == [2, 2, 0]


def test_wishes_for_requests_that_are_gone_are_ignored() -> None:
    assert homes(OWNED, held(OWNED, 5, homes=(1,)), r9=0) == [1]


def test_a_home_that_would_overflow_as_owner_passes_its_request_on() -> None:
    """Two stripes of 10 pages have their home on rank 0, which holds 12."""
    limits = np.array([12, 40, 30])
    assert homes(OWNED, held(STRIPED, 10, 10, homes=(0, 0)), limits) == [0, 1]
    assert homes(OWNED, held(STRIPED, 3, homes=(0,), final=13), limits) == [1]


def test_ranks_of_different_size_fill_alike() -> None:
    assert homes(OWNED, held(REPLICATED, *[3] * 5), np.array([6, 20])).count(0) == 1
    assert homes(OWNED, held(REPLICATED, *[2] * 12), np.array([8, 16])).count(0) == 4


def test_a_request_goes_where_it_fits_at_its_longest() -> None:
    assert homes(OWNED, held(REPLICATED, 1, 1, final=20), np.array([10, 10, 30])) == [2, 2]
    assert homes(OWNED, held(REPLICATED, 1, final=50), np.array([10, 10, 30])) == [2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 12), max_size=12),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([OWNED, STRIPED]),
)
def test_whoever_is_dealt_out_fits_on_roomy_ranks(pages: list[int], spare: list[int], kind: PlacementKind) -> None:
    """With each rank's share and the largest request on top there is always a rank with room."""
    limits = np.array([sum(pages) // len(spare) + max(pages, default=0) + extra for extra in spare])
    load = np.zeros(len(limits), np.int64)
    for n, target in zip(pages, choose_targets(kind, held(REPLICATED, *pages), limits, {}), strict=True):
        load[target.home] += n
    assert kind is STRIPED or (load <= limits).all()


@pytest.mark.parametrize("kind", [REPLICATED, OWNED, STRIPED])
def test_follow_keeps_a_home_and_takes_the_given_one_where_there_is_none(kind: PlacementKind) -> None:
    for before in (OWNED, STRIPED):
        expected = Placement(kind) if kind is REPLICATED else Placement(kind, 2)
        assert follow(Placement(before, 2), kind, 1) == expected
    assert follow(Placement(REPLICATED), kind, 1) == (Placement(kind) if kind is REPLICATED else Placement(kind, 1))
