"""Turns of rank 0's loop as whoever drives it sees them: what comes back when, and who decides on the layout."""

from __future__ import annotations

from typing import Any

import pytest

from splash_trt.config import EngineConfig, Layout
from splash_trt.layout.spec import Residency
from splash_trt.migration.diff import Sizes
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan
from splash_trt.request import FinishReason
from tests.oracles.checked_scheduler import new_scheduler, request
from tests.oracles.simulated_ranks import SimulatedRanks


class Silent:
    """A policy that never wants anything."""

    def __init__(self) -> None:
        self.looks = self.resumed = 0

    def observe(self, *about: object) -> None: ...

    def wants_to_look(self, *about: object) -> bool:
        self.looks += 1
        return False

    def resume(self) -> None:
        self.resumed += 1

    def expected_s(self, plan: Plan) -> float:
        return 0.01


class Loop:
    """An orchestrator of two simulated ranks, with a clock that stands unless it is set."""

    def __init__(self) -> None:
        config = EngineConfig(
            num_ranks=2, layouts=tuple(Layout), page_tokens=4, max_batch_tokens=32, max_running=8
        )
        pages: tuple[int, ...] = (14, 14)
        room = {residency: pages for residency in Residency}
        sizes = Sizes(page_tokens=4, row_bytes=64, itemsize=4, heads=(1, 1), head_numbers=(100, 7), pages=room)
        ranks = SimulatedRanks(config, sizes)

        def execute(plan: Plan) -> Any:
            result = ranks.execute(plan)
            return lambda: result

        self.now = 1.0
        self.policy = Silent()
        policy: Any = self.policy
        scheduler = new_scheduler(config, sizes, 56, 1 << 20)
        self.orchestrator = Orchestrator(scheduler, execute, 2, policy=policy, clock=lambda: self.now)


def test_an_end_is_told_in_the_turn_in_which_no_result_is_due() -> None:
    """A deadline passes while the first of two plans goes out: nothing is waited for, and what ended is told."""
    loop = Loop()
    loop.orchestrator.add(request("late", 4, 8, deadline_s=1.0))
    loop.orchestrator.add(request("other", 4, 8))
    loop.now = 3.0
    turn = loop.orchestrator.turn()
    assert turn.step == 0, "a result came: the situation did not arise"
    assert [(delta.request_id, delta.finish) for delta in turn.deltas] == [("late", FinishReason.CANCELLED)]


def test_it_is_not_idle_before_the_last_result_is_in() -> None:
    """Who stops driving it then would leave a plan's result, and the pages that it frees, behind."""
    loop = Loop()
    orchestrator = loop.orchestrator
    orchestrator.add(request("a", 4, 8))
    orchestrator.turn()
    orchestrator.cancel("a")
    assert not orchestrator.scheduler.has_requests and not orchestrator.idle
    while not orchestrator.idle:
        orchestrator.turn()
    orchestrator.scheduler.check_idle()


@pytest.mark.parametrize("stays", [False, True])
def test_a_pin_holds_until_auto_is_asked_for(stays: bool) -> None:
    """stays: the orders name the layout that serves, so that nothing is switched."""
    loop = Loop()
    orchestrator, policy = loop.orchestrator, loop.policy
    first, second = ("tp", "tp") if stays else ("dp", "dop")
    orchestrator.set_layout(first)
    assert orchestrator.mode == "auto", "an order without a pin leaves the policy in charge"
    orchestrator.set_layout(first, pin=True)
    orchestrator.set_layout(second)
    assert orchestrator.mode == "pinned", "an order without a pin lifted an earlier pin"
    while not orchestrator.idle:
        orchestrator.turn()
    orchestrator.turn()
    assert orchestrator.scheduler.layout is Layout.parse(second) and policy.looks == policy.resumed == 0
    orchestrator.set_layout("auto")
    orchestrator.turn()
    assert orchestrator.mode == "auto" and policy.looks == policy.resumed == 1
