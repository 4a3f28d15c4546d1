"""The memory of a switch: replicas and heads change places, live pages leave the top, or all stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, Residency
from splash_trt.layout.switch import State
from splash_trt.memory.map import memory_map
from splash_trt.models.families import load_config
from splash_trt.request import Request
from tests.switching.harness import STEP_S, WIDE, Server, Told, assert_same, held, make_requests, pages_of, scatter

RANKS = 3
SMALL = 3000


def test_a_full_tp_with_a_queue_reaches_dp(folder: Path, requests: list[Request], expected: dict[str, Told]) -> None:
    """Replicas fill every rank, so the other ranks' heads have no room: the way leads through DOP."""
    with Server(folder, ranks=RANKS, layout=Layout.TP, pages=20, migration_bytes=SMALL) as server:
        server.add(*requests)
        while (held(server) <= pages_of(server, Residency.FULL)).any():
            assert not server.orchestrator.idle
            server.step()
        assert server.scheduler.num_waiting > 10
        assert server.switch(Layout.DP).outcome == "committed"
        hops = [(record.source, record.target, record.outcome) for record in server.records]
        assert hops == [("tp", "dop", "committed"), ("dop", "dp", "committed")]
        assert server.num_preempted == 0, "a switch made somebody start again"
        assert server.scheduler.layout is Layout.DP and server.scheduler.num_running
        server.run()
    assert_same(server.told, expected)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10))])
def test_pages_live_at_random_leave_the_top_for_the_heads(
    folder: Path, requests: list[Request], expected: dict[str, Told], seed: int
) -> None:
    """60 % of all pages live, wherever: they are compacted below the heads while requests go on."""
    with Server(folder, ranks=RANKS, layout=Layout.TP, pages=60, migration_bytes=SMALL, **WIDE) as server:
        scatter(server, requests, seed)
        assert 0.5 < held(server).min() / pages_of(server, Residency.SHARD).min() <= 0.6
        pools, full = server.scheduler.directory.pools, pages_of(server, Residency.FULL).tolist()
        assert all(pool.held_from(limit) for pool, limit in zip(pools, full, strict=True)), "nothing is in the way"
        record = server.switch(Layout.DP)
        assert record.outcome == "committed" and len(server.records) == 1, server.records
        assert record.bytes_inside_ranks > 0
        assert record.steps_in["preparing"] > 1, "compaction took one step, whatever its budget"
        assert (server.scheduler.directory.limits() == pages_of(server, Residency.FULL)).all()
        server.run()
    assert_same(server.told, expected)


def test_no_room_aborts_naming_rank_and_shortfall_and_serving_goes_on(
    folder: Path, requests: list[Request], expected: dict[str, Told]
) -> None:
    """What ranks own together is more than each could replicate."""
    with Server(folder, ranks=RANKS, layout=Layout.DOP, pages=30, switch_hold_s=3 * STEP_S, **WIDE) as server:
        server.add(*requests)
        while held(server).sum() < 1.3 * pages_of(server, Residency.SHARD).min():
            assert not server.orchestrator.idle
            server.step()
        tokens = sum(len(told.tokens) for told in server.told.values())
        record = server.switch(Layout.TP)
        assert record.outcome.startswith("aborted: no room: rank "), record.outcome
        words = record.outcome.removeprefix("aborted: no room: rank ").split()
        assert int(words[0]) in range(RANKS) and words[1] == "lacks" and int(words[2]) > 0
        assert server.state is State.STEADY and server.scheduler.layout is Layout.DOP
        assert sum(len(told.tokens) for told in server.told.values()) > tokens, "nobody was served meanwhile"
        assert record.bytes_between_ranks == {"weights": 0, "pages": 0, "new_rows": 0}
        server.run()
        assert server.switch(Layout.TP).outcome == "committed"
    assert_same(server.told, expected)


def test_heads_come_from_the_cache_and_go_back(folder: Path) -> None:
    """The bytes of the other ranks' heads are pages in layouts that cut heads, to the page."""
    requests = make_requests(2, max_tokens=400)
    with Server(folder, ranks=RANKS, layout=Layout.DOP, pages=60) as server:
        server.add(*requests)
        server.step()
        for rank in range(RANKS):
            sizes = memory_map(load_config(folder), server.llm.config, rank)
            gained = pages_of(server, Residency.SHARD)[rank] - pages_of(server, Residency.FULL)[rank]
            whole, rest = divmod(sizes.others_bytes, sizes.page_bytes)
            assert whole > 0 and whole <= gained <= whole + 1 + (rest + 255 > sizes.page_bytes)
        for layout in (Layout.DP, Layout.TP, Layout.CP, Layout.DOP, Layout.DP):
            assert server.switch(layout).outcome == "committed"
            residency = SPECS[layout].residency
            directory = server.scheduler.directory
            assert (directory.limits() == pages_of(server, residency)).all()
            assert (directory.free_pages() + held(server) + directory.leaving_pages() == directory.limits()).all()
            assert all(server.runner(rank).weights.residency is residency for rank in range(RANKS))
        for request in requests:
            server.cancel(request.id)
        server.run()
