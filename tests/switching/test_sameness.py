"""Switching changes no token: whatever happens meanwhile, requests get what they would get without a switch."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.layout.spec import SPECS, PlacementKind
from splash_trt.layout.switch import State
from splash_trt.request import FinishReason, Request
from tests.switching.harness import LAYOUTS, PAIRS, TOUR, Server, Told, assert_same, never_switched, write_model

ARRIVE, SWITCH, OWNER, CANCEL, ABORT = "arrive", "switch", "owner", "cancel", "abort"
KINDS = (ARRIVE,) * 5 + (SWITCH,) * 4 + (OWNER, CANCEL, ABORT)

Event = tuple[int, str, int]
"""After how many steps, what, and a number to choose among what there is then."""

CASES: dict[str, st.SearchStrategy[Any]] = {
    "ranks": st.sampled_from([1, 2, 2, 3, 3, 4]),
    "layout": st.sampled_from(LAYOUTS),
    "spare": st.sampled_from([0, 3, 9, 50]),
    "config": st.fixed_dictionaries(
        {
            "plans_in_flight": st.sampled_from([1, 2]),
            "migration_bytes": st.sampled_from([1, 3000, 30000, 1 << 20]),
            "page_tokens": st.sampled_from([8, 8, 5]),
            "max_batch_tokens": st.sampled_from([12, 48]),
            "absorbed_tokens": st.sampled_from([1, 4]),
            "dop_absorbed_tokens": st.sampled_from([1, 8]),
            "switch_deadline_s": st.sampled_from([0.3, 60.0, 60.0]),
        }
    ),
    "events": st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(KINDS), st.integers(0, 1 << 12)), min_size=8, max_size=16
    ),
}
# One example takes half a second, so what failed is told as it was drawn.
PHASES = [Phase.explicit, Phase.generate]
HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def act(server: Server, kind: str, number: int, waiting: deque[Request]) -> None:
    """One event; nothing where there is nothing to do it to."""
    scheduler = server.scheduler
    living = [request_id for request_id, told in server.told.items() if told.finish is None]
    if kind == ARRIVE and waiting:
        server.add(*(waiting.popleft() for _ in range(min(len(waiting), 1 + number % 3))))
    elif kind == SWITCH:
        scheduler.switch(LAYOUTS[number % len(LAYOUTS)], "test")
    elif kind == OWNER and living and SPECS[scheduler.layout].placement is PlacementKind.OWNED:
        ranks = server.llm.config.num_ranks
        chosen = {living[number % len(living)]: number // 7 % ranks, living[0]: number % ranks}
        scheduler.switch(scheduler.layout, "test", owners=chosen)
    elif kind == CANCEL and living:
        server.cancel(living[number % len(living)])
    elif kind == ABORT:
        scheduler.abort_switch("test")


def serve(
    folder: Path, requests: list[Request], ranks: int, layout: Layout, spare: int, config: dict[str, Any],
    events: list[Event],
) -> Server:  # fmt: skip
    """All events, then on until idle. Returns the server, which has ended.

    spare: pages of a rank beyond those of the longest request.
    """
    waiting = deque(requests)
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in requests)
    pages = -(-longest // config["page_tokens"]) + spare
    with Server(folder, ranks=ranks, layout=layout, pages=pages, **config) as server:
        server.add(*(waiting.popleft() for _ in range(4)))
        for pause, kind, number in events:
            for _ in range(pause):
                server.step()
            act(server, kind, number, waiting)
        server.run()
        assert server.state is State.STEADY
        sizes = server.scheduler.switcher._sizes.pages[SPECS[server.scheduler.layout].residency]
        assert tuple(server.scheduler.directory.free_pages()) == sizes, "the arena's bounds are another layout's"
    return server


@settings(max_examples=25, derandomize=True, deadline=None, database=None, phases=PHASES, suppress_health_check=HEALTH)
@given(**CASES)
def test_drawn_schedules(
    folder: Path, requests: list[Request], expected: dict[str, Told], ranks: int, layout: Layout, spare: int,
    config: dict[str, Any], events: list[Event],
) -> None:  # fmt: skip
    assert_same(serve(folder, requests, ranks, layout, spare, config, events).told, expected)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=250, derandomize=True, deadline=None, database=None, phases=PHASES, suppress_health_check=HEALTH)
@given(**CASES)
def test_many_drawn_schedules(
    folder: Path, requests: list[Request], expected: dict[str, Told], ranks: int, layout: Layout, spare: int,
    config: dict[str, Any], events: list[Event],
) -> None:  # fmt: skip
    assert_same(serve(folder, requests, ranks, layout, spare, config, events).told, expected)


@pytest.mark.parametrize("heads", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_other_cuts_of_heads(tmp_path: Path, requests: list[Request], heads: int) -> None:
    """Of 3 heads one rank of 4 has none; 8 divide evenly."""
    folder = write_model(tmp_path / "model", num_attention_heads=heads)
    with Server(folder, ranks=4, layout=TOUR[0], pages=40, migration_bytes=20000) as server:
        server.add(*requests[:6])
        for target in TOUR[1:]:
            assert server.switch(target).outcome == "committed"
        assert {(r.source, r.target) for r in server.records} == {(a.name.lower(), b.name.lower()) for a, b in PAIRS}
        server.run()
    assert_same(server.told, never_switched(folder, requests[:6]))


def test_schedules_reach_what_they_are_for(
    folder: Path, requests: list[Request], expected: dict[str, Told]
) -> None:
    """A long schedule in little memory: switches that commit and that are aborted, preemptions, cancels in between."""
    rng = random.Random(8)
    events = [(rng.randrange(4), rng.choice(KINDS), rng.randrange(1 << 12)) for _ in range(60)]
    config = {"page_tokens": 8, "plans_in_flight": 2, "migration_bytes": 3000, "switch_hold_s": 0.05}
    server = serve(folder, requests, 3, Layout.TP, 3, config, events)
    assert_same(server.told, expected)
    outcomes = [record.outcome.split(":")[0] for record in server.records]
    assert outcomes.count("committed") >= 3 and outcomes.count("aborted") >= 2
    assert server.num_preempted > 0
    assert any(told.finish is FinishReason.CANCELLED and told.tokens for told in server.told.values())
