"""Moves between placements and residencies: all that is lacking, from someone who has it, each once."""

from __future__ import annotations

import itertools

import pytest

from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind, Residency
from splash_trt.migration.diff import PageMove, Sizes, page_moves, weight_moves

PLACEMENTS = [Placement(PlacementKind.REPLICATED)] + [
    Placement(kind, home) for kind in (PlacementKind.OWNED, PlacementKind.STRIPED) for home in range(3)
]


def where(placement: Placement, page: int, num_ranks: int) -> set[int]:
    """Written anew, from the definition."""
    if placement.kind is PlacementKind.REPLICATED:
        return set(range(num_ranks))
    return {placement.home if placement.kind is PlacementKind.OWNED else (placement.home + page) % num_ranks}


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (0, 7), (4, 5)])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_pages_go_where_they_lack_from_where_they_are(first: int, count: int, num_ranks: int) -> None:
    for before, after in itertools.product(PLACEMENTS, PLACEMENTS):
        moves = page_moves(before, after, first, count, num_ranks)
        lacking = [
            (page, rank)
            for page in range(first, first + count)
            for rank in sorted(where(after, page, num_ranks) - where(before, page, num_ranks))
        ]
        assert [(move.page_index, move.target) for move in moves] == lacking
        assert all(move.source in where(before, move.page_index, num_ranks) for move in moves)


def test_a_page_has_one_source_for_all_its_targets() -> None:
    moves = page_moves(Placement(PlacementKind.STRIPED, 1), Placement(PlacementKind.REPLICATED), 0, 2, 3)
    assert moves == [PageMove(0, 1, 0), PageMove(0, 1, 2), PageMove(1, 2, 0), PageMove(1, 2, 1)]


def sizes(*heads: int) -> Sizes:
    return Sizes(page_tokens=4, row_bytes=64, itemsize=2, heads=heads, head_numbers=(100, 7), pages={})


def test_only_shard_to_full_moves_weights() -> None:
    for before, after in itertools.product(Residency, Residency):
        expected = before is Residency.SHARD and after is Residency.FULL
        assert bool(weight_moves(before, after, sizes(2, 2))) == expected


@pytest.mark.parametrize("heads", [(4,), (2, 2), (7, 7, 6), (1, 0, 1, 0)])
def test_every_rank_gets_the_others_heads_once(heads: tuple[int, ...]) -> None:
    moves = weight_moves(Residency.SHARD, Residency.FULL, sizes(*heads))
    got = {(m.source, m.target, m.tensor): (m.begin, m.end) for m in moves}
    assert len(got) == len(moves)
    assert got == {
        (source, target, tensor): (0, numbers * heads[source])
        for source, target in itertools.permutations(range(len(heads)), 2)
        for tensor, numbers in enumerate((100, 7))
        if heads[source]
    }


def test_all_ranks_send_at_the_same_time() -> None:
    """Each turn of as many moves as there are ranks has every rank once as source and once as target."""
    moves = weight_moves(Residency.SHARD, Residency.FULL, sizes(2, 2, 2, 2))
    for begin in range(0, len(moves), 4):
        turn = moves[begin : begin + 4]
        assert {m.source for m in turn} == {m.target for m in turn} == set(range(4))


def test_a_page_is_all_its_tokens() -> None:
    assert sizes(1).page_bytes == 256
