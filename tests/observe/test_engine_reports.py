"""What rank 0 reports to frontends, to its observer and to its log, over a whole small run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from splash_trt.config import EngineConfig, Layout
from splash_trt.engine_server import EngineServer
from splash_trt.layout.spec import Residency
from splash_trt.link import (
    Decided,
    Explain,
    Explanation,
    Frames,
    LayoutCapacity,
    LayoutReply,
    Ready,
    SetLayout,
    Shutdown,
    Submit,
    SwitchReport,
    ToEngine,
)
from splash_trt.migration.diff import Sizes
from splash_trt.orchestrator import Orchestrator
from splash_trt.plan import Plan, StepResult
from splash_trt.request import Request, TokenDelta
from splash_trt.scheduler.policy import Decision
from tests.oracles.checked_scheduler import new_scheduler, request
from tests.oracles.simulated_ranks import SimulatedRanks

CLIENT = b"client"


class Clock:
    """A hundredth of a second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class OneDecision:
    """Wants DP, once, after some looks."""

    def __init__(self) -> None:
        self.looks = self.resumed = 0

    def observe(self, *about: object) -> None: ...

    def wants_to_look(self, *about: object) -> bool:
        return True

    def decide(self, load: object) -> Decision | None:
        self.looks += 1
        return Decision(Layout.DP, "it was said so", "crowd") if self.looks == 3 else None

    def resume(self) -> None:
        self.resumed += 1

    def expected_s(self, plan: Plan) -> float:
        return 0.01

    def explain(self) -> dict[str, object]:
        return {}


class Script:
    """A link: hands messages over one after the other and keeps what comes back. At the end it asks for the end."""

    def __init__(self, *messages: ToEngine | None) -> None:
        self._messages = list(messages)
        self.sent: list[Any] = []

    def poll(self, timeout_s: float) -> list[tuple[bytes, ToEngine | None]]:
        return [(CLIENT, self._messages.pop(0) if self._messages else Shutdown())]

    def send(self, client: bytes, message: object) -> bool:
        self.sent.append(message)
        return True

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def progress(self) -> None: ...


class Watcher:
    def __init__(self) -> None:
        self.sent: list[int] = []
        self.layouts: dict[int, str] = {}
        self.states: set[str] = set()
        self.numbers: set[int] = set()
        self.last = 0.0

    def planned(self, plan: Plan | None, state: str, record: Any, now: float) -> None:
        self._see(state, record, now)
        if plan is not None:
            self.sent.append(plan.step)

    def completed(self, plan: Plan, result: StepResult, state: str, record: Any, now: float) -> None:
        assert plan.step == result.step == self.sent.pop(0)
        self._see(state, record, now)
        if plan.num_tokens:
            self.layouts[plan.step] = plan.layout.name.lower()

    def _see(self, state: str, record: Any, now: float) -> None:
        assert now > self.last and (record is None) == (state == "steady")
        self.last = now
        self.states.add(state)
        self.numbers |= {record.number} if record is not None else set()


class Service:
    """Four requests on two ranks without room for all, of which one is refused, until the last one ends.

    more: messages that come after them. policy None: the layout changes when a message asks for it."""

    def __init__(self, *more: ToEngine, policy: Any = None) -> None:
        pages: tuple[int, ...] = (14, 14)
        config = EngineConfig(
            num_ranks=2, layouts=(Layout.TP, Layout.DP), page_tokens=4, max_batch_tokens=32, max_running=8
        )
        room = {Residency.SHARD: pages, Residency.FULL: pages}
        sizes = Sizes(page_tokens=4, row_bytes=64, itemsize=4, heads=(1, 1), head_numbers=(100, 7), pages=room)
        self.scheduler = new_scheduler(config, sizes, 56, 1 << 20)
        ranks = SimulatedRanks(config, sizes)

        def execute(plan: Plan) -> Any:
            result = ranks.execute(plan)
            return lambda: result

        orchestrator = Orchestrator(self.scheduler, execute, 2, policy=policy, clock=Clock())
        self.watcher = orchestrator.observer = Watcher()
        good = [request(name, 8, 24, seed=number) for number, name in enumerate("abcd")]
        bad = Request(id="bad", prompt=(1 << 30,), sampling=good[0].sampling)
        self.link = Script(None, *map(Submit, [*good, bad]), *more)
        ready = Ready("first", 400, 56, (), 2, ("tp", "dp"), {"tp": LayoutCapacity(pages, 28, 14)})
        link: Any = self.link
        self.server = EngineServer(orchestrator, link, ready, link, 4)
        self.server.run(lambda: False)


@pytest.fixture(scope="module")
def logged() -> list[logging.LogRecord]:
    return []


@pytest.fixture(scope="module")
def service(logged: list[logging.LogRecord]) -> Service:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    log, keep = logging.getLogger("splash_trt.engine_server"), Keep()
    log.addHandler(keep)
    log.setLevel(logging.DEBUG)
    try:
        return Service(policy=OneDecision())
    finally:
        log.removeHandler(keep)
        log.setLevel(logging.NOTSET)


def test_steps_preemptions_and_the_decision(service: Service) -> None:
    frames: list[Frames] = service.link.of(Frames)
    assert {f.step: f.layout for f in frames if f.num_tokens} == service.watcher.layouts
    assert set(service.watcher.layouts.values()) == {"tp", "dp"}
    assert sum(f.preemptions for f in frames) == service.scheduler.preemptions > 0
    assert [f.decision for f in frames if f.decision is not None] == [Decided("tp", "dp", "crowd")]


def test_the_time_in_the_queue_comes_with_the_first_token(service: Service) -> None:
    deltas: dict[str, list[TokenDelta]] = {}
    for frames in service.link.of(Frames):
        for delta in frames.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    assert [delta.queued_s for delta in deltas.pop("bad")] == [None]
    assert set(deltas) == set("abcd")
    for of_request in deltas.values():
        first, *others = of_request
        assert first.tokens and first.queued_s is not None and 0 < first.queued_s < 100
        assert all(delta.queued_s is None for delta in others) and sum(len(d.tokens) for d in of_request) == 24


def test_the_observer_sees_every_plan_and_the_switch(service: Service) -> None:
    assert service.watcher.sent == [] and service.watcher.numbers == {1}
    assert {"steady", "armed", "retiring"} <= service.watcher.states


def test_the_log(service: Service, logged: list[logging.LogRecord]) -> None:
    lines = {record.getMessage(): record for record in logged}
    assert len(lines) == len(logged) == 3  # one each
    (report,) = [r for r in service.link.of(SwitchReport) if r.record["ended"]][-1:]
    switch = lines["switch"].fields  # type: ignore[attr-defined]
    for name in ("number", "source", "target", "why", "outcome", "bytes_between_ranks", "stall_s"):
        assert switch.get(name) == report.record[name]
    decision = lines["decision"].fields  # type: ignore[attr-defined]
    assert decision == {"source": "tp", "target": "dp", "kind": "crowd", "why": "it was said so"}
    refused = lines["refused"]
    assert refused.levelname == "DEBUG"
    assert refused.fields == {"request": "bad", "field": "prompt"}  # type: ignore[attr-defined]


def test_the_policy_begins_anew_only_after_a_pin(service: Service) -> None:
    policy: Any = OneDecision()
    orchestrator = Orchestrator(service.scheduler, policy.decide, 2, policy=policy)
    orchestrator.set_layout("auto")
    assert policy.resumed == 0
    for _ in range(2):
        orchestrator.set_layout(service.scheduler.layout.name, pin=True)
    orchestrator.set_layout("auto")
    assert (policy.resumed, orchestrator.mode) == (1, "auto")


def test_a_frontend_that_comes_late_is_told_what_all_frames_counted(service: Service) -> None:
    summed: dict[tuple[str, ...], float] = {}
    for frames in service.link.of(Frames):
        for key, count in frames.counts.items():
            summed[key] = summed.get(key, 0.0) + count
    num_sent = len(service.link.sent)
    service.server._handle(b"late", None)
    late = service.link.of(Frames)[-1]
    del service.link.sent[num_sent:]
    assert late.totals == summed
    assert {key[0] for key in summed} == {"sizes", "steps", "tokens", "seconds", "preemptions", "decisions"}
    assert not late.counts
    first, *others = service.link.of(Frames)
    assert first.totals == {} and all(frames.totals is None for frames in others)


def test_a_switch_is_told_of_before_it_is_accepted() -> None:
    """Whoever asked and now waits for "steady" must not find the layout that was there before."""
    sent = Service(SetLayout(1, "dp"), Explain(2), SetLayout(3, "tp")).link.sent
    accepted, explained, returned = (
        next(i for i, message in enumerate(sent) if isinstance(message, kind) and message.token == token)
        for kind, token in ((LayoutReply, 1), (Explanation, 2), (LayoutReply, 3))
    )
    told = [message.status for message in sent[accepted - 1 : returned - 1] if isinstance(message, Frames)]
    assert told and {(status.layout, status.switch_target) for status in told} == {("tp", "dp")}
    assert told[0].switch_progress == 0 and all(status.switch != "steady" for status in told)
    assert sent[explained].report["switch"] != "steady"
    last = [message.status for message in sent if isinstance(message, Frames)][-1]
    assert (last.layout, last.switch, last.switch_target, last.switch_progress) == ("tp", "steady", None, 1.0)
