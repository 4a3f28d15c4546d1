"""Pushing what a switch moves into other ranks' memory: the same bytes, wherever chance puts the copies."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_trt.cache.storage import PageStorage
from splash_trt.config import EngineConfig, Layout
from splash_trt.dist.world import ThreadWorld, World
from splash_trt.layout.spec import Residency
from splash_trt.memory.arena import DTYPES, Arena
from splash_trt.memory.map import memory_map
from splash_trt.migration.mover import Mover
from splash_trt.migration.pieces import Places, merged, split
from splash_trt.models.config import ModelConfig
from splash_trt.models.families import load_config
from splash_trt.plan import Plan
from splash_trt.request import Request
from splash_trt.weights.store import WeightStore
from tests.device_ranks import device_ranks
from tests.plans import empty_plan
from tests.switching.harness import SETTINGS, TOUR, Server, Told, assert_same, memory_for
from tests.switching.peer_memory import HostCarrier, meet, peer_mover

PAGE = 8


def sized(folder: Path, ranks: int, dtype: str) -> tuple[ModelConfig, EngineConfig]:
    settings = {**SETTINGS, "num_ranks": ranks, "layout": Layout.TP, "dtype": dtype, "page_tokens": PAGE}
    return load_config(folder), EngineConfig(memory_bytes=memory_for(folder, 24, **settings), **settings)


def random_plan(model: ModelConfig, config: EngineConfig, seed: int) -> Plan:
    """Compaction, full and begun pages, heads, late rows: no byte is written twice, and none that is read."""
    rng, ranks = np.random.default_rng(seed), config.num_ranks
    pages = [
        rng.permutation(memory_map(model, config, rank).num_pages(Residency.FULL)).tolist() for rank in range(ranks)
    ]
    moves: list[tuple[int, ...]] = []
    late: list[tuple[int, ...]] = []
    for rank in range(ranks):
        for _ in range(3 * (seed % 2)):
            moves.append((rank, pages[rank].pop(), rank, pages[rank].pop(), 0, PAGE))
    for _ in range(3 * ranks):
        source, target = rng.choice(ranks, 2, replace=False).tolist()
        here, there = pages[source].pop(), pages[target].pop()
        begun, end = sorted(rng.integers(0, PAGE + 1, 2).tolist())
        if rng.random() < 0.4:
            begun = end = PAGE
        if begun:
            moves.append((source, here, target, there, 0, begun))
        if end > begun:
            late.append((source, here, target, there, begun, end - begun))
    weights = []
    kinds = (config.dtype, config.experts_cut)
    store = [WeightStore(Arena(memory_map(model, config, r)), model, r, ranks, *kinds) for r in range(ranks)]
    for tensor, name in enumerate(store[0].others):
        for source in range(ranks):
            numbers = store[source].own[name].numel()
            begin, end = sorted(rng.integers(0, numbers + 1, 2).tolist())
            targets = [rank for rank in range(ranks) if rank != source]
            weights += [(source, target, tensor, begin, end) for target in targets if end > begin]
    order = rng.permutation(len(moves))
    return empty_plan(
        ranks,
        moves=np.array(moves, np.int32).reshape(-1, 6)[order],
        late_moves=np.array(late, np.int32).reshape(-1, 6),
        weights=np.array(weights, np.int64).reshape(-1, 5),
    )


class Rank:
    """One rank's memory under one kind of mover."""

    def __init__(self, world: World, model: ModelConfig, config: EngineConfig, pushes: bool, seed: int) -> None:
        sizes = memory_map(model, config, world.rank)
        generator = torch.Generator().manual_seed(100 * seed + world.rank)
        shape = (sizes.memory_bytes,)
        self.bytes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        arena = Arena(sizes, self.bytes)
        self._storage = PageStorage(arena, model, config.page_tokens, DTYPES[config.dtype])
        if pushes:
            self.mover: Any = peer_mover(world, model, config, arena, seed)
        else:
            weights = WeightStore(arena, model, world.rank, world.size, config.dtype, config.experts_cut)
            self.mover = Mover(self._storage, weights, world.collectives)
        self._world = world

    def step(self, plan: Plan) -> str:
        """A step with its meetings, whose kernels write the rows that move late, and the target's own copies' rows."""
        error = self.mover.before(plan)
        for turn in range(2):
            meet(self._world)
            for source, page, *_, first, count in plan.late_moves.tolist():
                if turn and source == self._world.rank:
                    rows = self._storage.rows(page, first, count)
                    rows.copy_(torch.arange(rows.numel()).view(rows.shape) % 100 + page)
        meet(self._world)
        error += self.mover.after(plan)
        meet(self._world)
        return error


def both(world: World, model: ModelConfig, config: EngineConfig, plan: Plan, seed: int) -> dict[str, int]:
    """The step with either mover; what was sent."""
    ranks = [Rank(world, model, config, pushes, seed) for pushes in (False, True)]
    before = ranks[0].bytes.clone()
    assert torch.equal(before, ranks[1].bytes)
    for rank in ranks:
        assert rank.step(plan) == ""
    assert torch.equal(ranks[0].bytes, ranks[1].bytes)
    assert world.rank == 0 or not torch.equal(before, ranks[0].bytes)
    assert ranks[0].mover.bytes_sent == ranks[1].mover.bytes_sent
    return dict(ranks[1].mover.bytes_sent)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_byte_is_as_the_exchange_puts_it(folder: Path, ranks: int, dtype: str) -> None:
    model, config = sized(folder, ranks, dtype)
    for seed in range(4):
        plan = random_plan(model, config, seed)
        sent = ThreadWorld(ranks).run(lambda world, plan=plan, seed=seed: both(world, model, config, plan, seed))
        for kind in ("pages", "new_rows", "weights"):
            assert sum(mine[kind] for mine in sent) > 0


def test_ranks_meet_between_moves_inside_them_and_pushes(folder: Path) -> None:
    """Rank 1 makes room where rank 0 pushes to: what lay there must have gone first."""
    model, config = sized(folder, 2, "float32")
    moves = np.array([(1, 5, 1, 2, 0, PAGE), (0, 3, 1, 5, 0, PAGE)], np.int32)
    plan = empty_plan(2, moves=moves)
    ThreadWorld(2).run(lambda world: both(world, model, config, plan, 1))
    apart = ThreadWorld(2)
    with patch("tests.switching.peer_memory.meet", lambda world: None), pytest.raises(AssertionError):
        apart.run(lambda world: both(world, model, config, plan, 1))


def test_without_a_meeting_after_it_nothing_is_pushed(folder: Path) -> None:
    model, config = sized(folder, 2, "float32")
    moves = np.array([(0, 3, 1, 5, 0, PAGE)], np.int32)
    plan = msgspec.structs.replace(empty_plan(2, moves=moves), attempt=0)
    with pytest.raises(AssertionError, match="meeting"):
        ThreadWorld(2).run(lambda world: Rank(world, model, config, True, 1).step(plan))


class Refuses(HostCarrier):
    """A driver that takes no copy beside the step."""

    def beside(self, pieces: np.ndarray) -> None:
        raise RuntimeError("no such address")


def test_a_refused_copy_is_reported(folder: Path) -> None:
    model, config = sized(folder, 2, "float32")
    plan = empty_plan(2, moves=np.array([(0, 3, 1, 5, 0, PAGE)], np.int32))
    with patch("tests.switching.peer_memory.HostCarrier", Refuses):
        errors = ThreadWorld(2).run(lambda world: Rank(world, model, config, True, 1).step(plan))
    assert errors == ["RuntimeError: no such address", ""]


# Pieces


def test_full_pages_and_their_neighbours_are_one_piece(folder: Path) -> None:
    model, config = sized(folder, 2, "float32")
    maps = [memory_map(model, config, rank) for rank in range(2)]
    places = Places(model, "float32", "whole", PAGE, maps, [0, 1 << 40])
    size = maps[0].page_bytes
    moves = np.array([(0, 4, 1, 8, 0, PAGE), (0, 3, 1, 7, 0, PAGE), (0, 5, 1, 2, 0, PAGE)], np.int32)
    pieces = merged(places.rows(moves))
    here, there = maps[0].pages_offset, (1 << 40) + maps[1].pages_offset
    assert pieces.tolist() == [[here + 3 * size, there + 7 * size, 2 * size], [here + 5 * size, there + 2 * size, size]]
    begun = places.rows(np.array([(0, 4, 1, 8, 2, 3)], np.int32))
    row = size // PAGE // model.num_layers
    layer = size // model.num_layers
    assert begun.tolist() == [
        [here + 4 * size + i * layer + 2 * row, there + 8 * size + i * layer + 2 * row, 3 * row]
        for i in range(model.num_layers)
    ]
    assert places.row_bytes(moves) == 3 * size


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12), st.integers(0, 4), st.randoms())
def test_merged_pieces_name_the_same_bytes(runs: list[tuple[int, int]], most: int, random: Random) -> None:
    pieces, source, target = [], 0, 1000
    for gap, length in runs:
        source, target = source + gap % 3, target + gap % 2
        pieces.append((source, target, length))
        source, target = source + length, target + length
    random.shuffle(pieces)
    given_pieces = np.array(pieces, np.int64).reshape(-1, 3)
    found = merged(given_pieces)
    assert named(found) == named(given_pieces)
    ends = {(a + n, b + n) for a, b, n in found.tolist()}
    assert not ends & {(a, b) for a, b, _ in found.tolist()}
    large, small = split(found, 4, most + 1, 1)
    assert named(large) | named(small) == named(found)
    assert len(large) <= most + 1 and (large[:, 2] >= 4).all()
    assert (split(found, 4, most + 1, 2)[1] % 2 == 0).all()


def named(pieces: np.ndarray) -> set[tuple[int, int]]:
    return {(source + i, target + i) for source, target, count in pieces.tolist() for i in range(count)}


# Under load


@pytest.mark.parametrize(
    ("ranks", "in_flight"), [(2, 2), (3, 2), *(pytest.param(*c, marks=pytest.mark.nightly) for c in ((4, 2), (3, 1)))]
)
def test_a_tour_under_load_tells_the_same(
    folder: Path, requests: list[Request], expected: dict[str, Told], ranks: int, in_flight: int
) -> None:
    """Movers as GPUs have them, in one process: every switch, compaction included, while requests come and end."""
    waiting = list(requests)
    config = {"migration_bytes": 12000, "migration_max_slowdown": 1000.0, "plans_in_flight": in_flight}
    with (
        device_ranks(make_mover=peer_mover),
        Server(folder, ranks=ranks, layout=TOUR[0], pages=40, **config) as server,
    ):
        for target in TOUR[1:]:
            server.add(*waiting[:3])
            del waiting[:3]
            record = server.switch(target)
            assert record.outcome == "committed", record
        server.add(*waiting)
        server.run()
        sent = [server.runner(rank)._mover.bytes_sent for rank in range(ranks)]
        moved = [plan for plan in server.plans if len(plan.moves) and (plan.moves[:, 0] == plan.moves[:, 2]).any()]
    assert_same(server.told, expected)
    for kind in ("pages", "new_rows", "weights"):
        told = sum(record.bytes_between_ranks[kind] for record in server.records)
        assert sum(mine[kind] for mine in sent) == told > 0
    assert moved, "nothing was compacted"
