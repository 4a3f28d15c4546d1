"""Switches with every expert cut over the ranks: heads lie elsewhere in the arena, and requests are told the same."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from splash_trt.request import Request
from tests.device_ranks import device_ranks
from tests.switching.harness import PAIRS, TOUR, Server, Told, assert_same, never_switched, write_model
from tests.switching.peer_memory import peer_mover


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in both layers, so that heads come after some; of 23 numbers, which divide by no number of ranks."""
    changes = {"first_k_dense_replace": 0, "moe_intermediate_size": 23}
    return write_model(tmp_path_factory.mktemp("experts"), **changes)


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[Request]) -> dict[str, Told]:
    return never_switched(folder, requests[:20])


@pytest.mark.parametrize(("ranks", "pushes"), [(2, True), (3, False), (3, True)])
def test_a_tour_under_load(
    folder: Path, requests: list[Request], expected: dict[str, Told], ranks: int, pushes: bool
) -> None:
    """pushes: by movers as GPUs have them, which reckon where each head lies on every rank."""
    how: AbstractContextManager[None] = device_ranks(make_mover=peer_mover) if pushes else nullcontext()
    waiting = list(requests[:20])
    config = {"experts_cut": "inside", "migration_bytes": 12000, "migration_max_slowdown": 1000.0}
    with how, Server(folder, ranks=ranks, layout=TOUR[0], pages=40, **config) as server:
        for target in TOUR[1:]:
            server.add(*waiting[:2])
            del waiting[:2]
            assert server.switch(target).outcome == "committed"
        assert {(r.source, r.target) for r in server.records} == {(a.name.lower(), b.name.lower()) for a, b in PAIRS}
        server.run()
        inner = [server.runner(rank).weights.own["layers.1.experts.down"].shape[2] for rank in range(ranks)]
        assert inner == ([12, 11] if ranks == 2 else [8, 8, 7])
        assert sum(record.bytes_between_ranks["weights"] for record in server.records) > 0
    assert_same(server.told, expected)
