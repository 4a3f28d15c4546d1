"""As tests/layouts/test_program_mutations.py does for steps, for what ranks do in a switch that write into each other's
memory: with a mistake planted in it, a tour of all switches is noticed to go wrong."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.migration.peer_mover import PeerMover
from splash_trt.migration.pieces import Places
from splash_trt.plan import NO_PAGE, Plan
from splash_trt.request import Request
from splash_trt.runtime.block_tables import BlockTables
from splash_trt.runtime.device_runner import DeviceRunner
from tests.device_ranks import device_ranks
from tests.planting import Plant, given, giving, kernel, put
from tests.switching.harness import MODEL, TOUR, WIDE, Server, Told, assert_same, noticed, scatter
from tests.switching.peer_memory import HostCarrier, peer_mover

take_over = DeviceRunner._take_over
ROW_BYTES = (MODEL["kv_lora_rank"] + MODEL["qk_rope_head_dim"]) * 8


def old_tables_go_on(self: DeviceRunner, plan: Plan) -> bool:
    before = self._state.tables.clone()
    begins = take_over(self, plan)
    if begins:
        self._state.tables.copy_(before)
    return begins


def targets_are_lost(changes: tuple[Any, Any]) -> tuple[Any, Any]:
    own, (place, page) = changes
    return own, (place[:0], page[:0])


def not_the_last(pieces: np.ndarray) -> np.ndarray:
    return pieces[:-1]


def a_row_less(pieces: np.ndarray) -> np.ndarray:
    return pieces - np.array([0, 0, ROW_BYTES])


def forgets_what_waits(self: HostCarrier) -> None:
    self._waiting.clear()


def only_joins(self: PeerMover, plan: Plan) -> str:
    self._carrier.join()
    return ""


def as_it_was(self: BlockTables, changes: np.ndarray, pages: np.ndarray) -> Any:
    """A page that a plan names twice has the first one's place."""
    slot, index = changes[changes[:, 0] == self._rank, 1:3].T
    places = slot.astype(np.int64) * pages.shape[1] + index
    _, first = np.unique(places, return_index=True)
    return places[first], changes[changes[:, 0] == self._rank, 3][first]


MOVER, TABLES = "splash_trt.migration.peer_mover.PeerMover", "splash_trt.runtime.block_tables.BlockTables"
CARRIER, PLACES = "tests.switching.peer_memory.HostCarrier", "splash_trt.migration.pieces.Places"
MISTAKES: dict[str, Plant] = {
    "new rows are written under the old layout alone": kernel(
        "latent_rows", lambda rows: given(rows, target_page=lambda page: page * 0 + NO_PAGE)
    ),
    "new rows stay where they were computed": put(f"{MOVER}.after", only_joins),
    "the tables of before go on": put("splash_trt.runtime.device_runner.DeviceRunner._take_over", old_tables_go_on),
    "new pages are not told to the device": put(
        f"{TABLES}.own_changes", giving(BlockTables.own_changes, targets_are_lost)
    ),
    "a piece of rows is left out": put(f"{PLACES}.rows", giving(Places.rows, not_the_last)),
    "a piece of heads is left out": put(f"{PLACES}.heads", giving(Places.heads, not_the_last)),
    "copies beside the step are forgotten": put(f"{CARRIER}.join", forgets_what_waits),
}


def nothing(planted: ExitStack) -> None:
    pass


def tour(folder: Path, requests: list[Request], expected: dict[str, Told], plant: Plant) -> Server:
    """From each layout to each other one, with requests that arrive and end meanwhile, until something is noticed."""
    with ExitStack() as planted:
        plant(planted)
        planted.enter_context(device_ranks((2, 4, 7, 16), peer_mover))
        with Server(folder, ranks=2, layout=TOUR[0], pages=60, migration_bytes=30000) as server:
            for number, target in enumerate(TOUR[1:]):
                server.add(*requests[2 * number : 2 * number + 2])
                server.switch(target)
                if noticed(server.told, expected):
                    return server
            server.run()
    return server


def compaction(folder: Path, requests: list[Request], expected: dict[str, Told], plant: Plant) -> Server:
    """TP to DP with 60 % of all pages live, wherever: new tables and moved pages in one plan."""
    with ExitStack() as planted:
        plant(planted)
        planted.enter_context(device_ranks((2, 4, 7, 16), peer_mover))
        with Server(folder, ranks=2, layout=Layout.TP, pages=60, migration_bytes=30000, **WIDE) as server:
            scatter(server, requests, 0)
            for _ in range(3):  # until what was cancelled has left
                server.step()
            server.switch(Layout.DP)
            if not noticed(server.told, expected):
                server.run()
    return server


@pytest.mark.parametrize("go", [tour, compaction])
def test_without_a_mistake(folder: Path, requests: list[Request], expected: dict[str, Told], go: Any) -> None:
    server = go(folder, requests, expected, nothing)
    assert {record.outcome for record in server.records} == {"committed"}
    if go is compaction:
        assert server.records[-1].bytes_inside_ranks > 0
        assert any(len(np.unique(p.target_tables[:, :3], axis=0)) < len(p.target_tables) for p in server.plans)
    assert_same(server.told, expected)


@pytest.mark.parametrize("what", list(MISTAKES))
def test_a_planted_mistake_is_noticed(
    folder: Path, requests: list[Request], expected: dict[str, Told], what: str
) -> None:
    server = tour(folder, requests, expected, MISTAKES[what])
    assert noticed(server.told, expected)


IN_COMPACTION: dict[str, Plant] = {
    "a page told twice is where it was first": put(f"{TABLES}._own", as_it_was),
    "pages are moved by all but a row": put(f"{PLACES}.rows", giving(Places.rows, a_row_less)),
}


@pytest.mark.parametrize("what", list(IN_COMPACTION))
def test_so_it_is_in_compaction(folder: Path, requests: list[Request], expected: dict[str, Told], what: str) -> None:
    server = compaction(folder, requests, expected, IN_COMPACTION[what])
    assert noticed(server.told, expected)
