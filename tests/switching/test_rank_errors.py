"""A rank that cannot copy ends the switch, one that fails elsewhere ends the run; in neither case is a token wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from splash_trt.config import Layout
from splash_trt.dist.collectives import RankFailure
from splash_trt.layout.switch import State
from splash_trt.migration.mover import Mover
from splash_trt.plan import Plan
from splash_trt.request import Request
from splash_trt.scheduler.switcher import Switcher
from tests.switching.harness import WIDE, Server, Told, assert_same, scatter

RANKS = 3
SMALL = 2000


class Fails:
    """Calls `function`, but raises RuntimeError once when the switch is in `state`."""

    def __init__(self, server: Server, state: State, function: Callable[..., Any]) -> None:
        self._server = server
        self._state = state
        self._function = function
        self.count = 0

    def __call__(self, *arguments: Any) -> Any:
        if self._server.state is self._state and not self.count:
            self.count += 1
            raise RuntimeError("planted")
        return self._function(*arguments)


def part(server: Server, rank: int, name: str) -> tuple[object, str]:
    """The object and attribute through which a rank's copies go."""
    runner = server.runner(rank)
    return (runner.storage, "rows") if name == "rows" else (runner.weights, name)


COPIES = [
    pytest.param(Layout.DP, Layout.TP, "rows", State.MIGRATING, 0, id="a page's source or target"),
    pytest.param(Layout.CP, Layout.DOP, "rows", State.MIGRATING, 2, id="a stripe's source or target"),
    pytest.param(Layout.TP, Layout.DP, "own_part", State.MIGRATING, 1, id="the source of heads"),
    pytest.param(Layout.DOP, Layout.CP, "others_part", State.MIGRATING, 0, id="the target of heads"),
    pytest.param(Layout.DP, Layout.CP, "rows", State.ARMED, 2, id="a new row"),
    pytest.param(Layout.DP, Layout.CP, "rows", State.ARMED, 0, id="a new row on the rank in charge"),
]


@pytest.mark.parametrize(("source", "target", "name", "state", "rank"), COPIES)
def test_a_copy_that_fails_aborts_the_switch(
    folder: Path, requests: list[Request], expected: dict[str, Told],
    source: Layout, target: Layout, name: str, state: State, rank: int,
) -> None:  # fmt: skip
    with Server(folder, ranks=RANKS, layout=source, pages=60, migration_bytes=SMALL, plans_in_flight=2) as server:
        server.add(*requests[:9])
        for _ in range(4):
            server.step()
        owner, attribute = part(server, rank, name)
        fails = Fails(server, state, getattr(owner, attribute))
        with patch.object(owner, attribute, fails):
            record = server.switch(target)
        assert fails.count == 1, "the fault never struck"
        assert record.outcome == f"aborted: rank {rank} could not copy: RuntimeError: planted"
        assert server.scheduler.layout is source and state.value in record.steps_in
        assert server.switch(target).outcome == "committed"
        server.run()
    assert_same(server.told, expected)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_new_row_lost_after_the_commit_was_decided_is_computed_again(
    folder: Path, requests: list[Request], expected: dict[str, Told], rank: int
) -> None:
    """The last plan of the old layout is on its way when the new one begins: what it loses the new one lacks."""
    server = Server(folder, ranks=RANKS, layout=Layout.DP, pages=60, migration_bytes=1 << 20, plans_in_flight=2)
    server.add(*requests[:9])
    for _ in range(4):
        server.step()
    after, armed = Mover.after, 0

    def fails(mover: Mover, plan: Plan) -> str:
        nonlocal armed
        error = after(mover, plan)
        here = server.state is State.ARMED and mover._comm.rank == rank
        armed += here
        return "planted" if here and armed == 2 else error

    with patch.object(Mover, "after", fails):
        server.scheduler.switch(Layout.CP, "test")
        server.run()
    assert armed >= 2 and server.records[-1].outcome == "committed"
    assert_same(server.told, {request_id: expected[request_id] for request_id in server.told})


def test_a_failed_compaction_ends_the_run_naming_the_rank(folder: Path, requests: list[Request]) -> None:
    """Rows that were to leave the top of the arena are the only ones there are: nothing wrong may come of them."""
    server = Server(folder, ranks=2, layout=Layout.TP, pages=60, migration_bytes=SMALL, **WIDE)
    scatter(server, requests, seed=0)
    owner, attribute = part(server, 1, "rows")
    fails = Fails(server, State.PREPARING, getattr(owner, attribute))
    with patch.object(owner, attribute, fails), pytest.raises(RuntimeError, match="rank 1 failed: .*planted"):
        server.switch(Layout.DP)
    server.leave()


@pytest.mark.parametrize("state", [State.PREPARING, State.MIGRATING, State.ARMED, State.RETIRING, State.ABORTING])
def test_a_rank_that_fails_elsewhere_ends_the_run_naming_it(
    folder: Path, requests: list[Request], expected: dict[str, Told], state: State
) -> None:
    """In every state; what had been told until then was right."""
    server = Server(folder, ranks=RANKS, layout=Layout.DP, pages=60, migration_bytes=SMALL, plans_in_flight=2)
    server.add(*requests[:9])
    for _ in range(4):
        server.step()
    owner = server.runner(2)._forward._builder
    fails = Fails(server, state, owner.build)
    stays = patch.object(Switcher, "_prepare", lambda *_, **__: None) if state is State.PREPARING else nullcontext()
    with stays, patch.object(owner, "build", fails), pytest.raises(RankFailure, match="rank 2 failed: .*planted"):
        server.scheduler.switch(Layout.TP, "test")
        if state is State.ABORTING:
            server.until(State.MIGRATING)
            server.scheduler.abort_switch("test")
        server.run()
    assert fails.count == 1
    for request_id, told in server.told.items():
        assert told.tokens == expected[request_id].tokens[: len(told.tokens)]
    server.leave()
