"""Nobody waits for ever, whatever keeps arriving: the bound that the scheduler states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splash_trt.config import EngineConfig, Layout
from splash_trt.plan import encode
from splash_trt.request import Request
from splash_trt.scheduler.sequence import Sequence
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

MAX_WAIT_S = 10.0
BUSY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass
class Stream:
    """`patient` are there at time 0; an important request of some shape arrives in every step, one second each."""

    pages: tuple[int, ...]
    layout: Layout
    options: dict[str, Any]
    patient: list[Request]
    shapes: list[tuple[int, int, int]]
    """Prompt, output and priority of those that keep arriving, in turn."""

    def start(self) -> CheckedScheduler:
        c = CheckedScheduler(self.pages, layout=self.layout, **self.options)
        c.add(*self.patient)
        return c

    def step(self, c: CheckedScheduler, step: int) -> list[str]:
        """Returns who got cache."""
        prompt, output, priority = self.shapes[step % len(self.shapes)]
        c.add(request(f"s{step:04d}", prompt, output, priority=priority), now=float(step))
        plan = c.step(now=float(step))
        return [] if plan is None else [c.request(seed).id for seed in plan.sampling["seed"].tolist()]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    num_ranks = draw(st.integers(1, 3))
    pages = tuple(draw(st.integers(3, 8)) for _ in range(num_ranks))
    running = draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "page_tokens": draw(st.sampled_from([1, 2, 4])),
        "max_running": running,
        "max_batch_tokens": running + draw(st.integers(0, 8)),
        "plans_in_flight": draw(st.integers(1, 2)),
        "max_wait_s": MAX_WAIT_S,
    }
    layout = draw(st.sampled_from(list(Layout)))
    longest = CheckedScheduler(pages, layout=layout, **options).request_tokens - 1
    lengths, outputs = st.integers(1, longest), st.integers(1, 12)
    patient = [request(f"p{i}", draw(lengths), draw(outputs)) for i in range(draw(st.integers(1, 3)))]
    shapes = draw(st.lists(st.tuples(lengths, outputs, st.integers(1, 3)), min_size=1, max_size=3))
    return Stream(pages, layout, options, patient, shapes)


def _work(c: CheckedScheduler, sequence: Sequence) -> int:
    """Steps that a request needs if nobody takes cache or room from it."""
    room = c.config.max_batch_tokens - c.config.max_running + 1
    return -(-sequence.limit // room) + sequence.request.sampling.max_tokens + 1


@BUSY
@given(streams())
def test_an_overdue_request_waits_only_for_those_before_it(stream: Stream) -> None:
    """Those that hold cache when it becomes overdue, and overdue ones that arrived earlier."""
    c = stream.start()
    living = c.scheduler._sequences
    before: dict[str, set[str]] = {}  # by overdue request
    bounds: dict[str, float] = {}
    step = 0
    while not all(r.id in c.outputs.finish for r in stream.patient):
        known, overdue = dict(living), {name for name, s in living.items() if s.overdue}
        holders = {name for name, s in living.items() if s.slot >= 0}
        waiting = {r.id for r in stream.patient if r.id in living and living[r.id].slot < 0}
        admitted = stream.step(c, step)
        waiting &= {name for name, s in living.items() if s.slot < 0}
        passed_over = waiting and step > MAX_WAIT_S and [name for name in admitted if name.startswith("s")]
        assert not passed_over, f"{passed_over} got cache while {waiting} waited for more than {MAX_WAIT_S} s"
        assert step < 20_000, "nobody gets on, and nobody is overdue"
        for name in [name for name, s in known.items() if s.overdue and name not in overdue]:
            earlier = {n for n, s in known.items() if s.overdue and s.arrival < known[name].arrival}
            before[name] = holders | earlier
            steps = sum(_work(c, known[n]) for n in {*before[name], name})
            bounds[name] = step + 10 + 2 * (c.config.plans_in_flight + 1) * steps
        for name in before:
            if name in living and living[name].slot < 0:
                assert before[name].issuperset(admitted), f"{admitted} got cache before {name}"
        step += 1
        late = {name for name, bound in bounds.items() if name in living and step > bound}
        assert not late, f"{late} are not done after {step} steps"
    for r in stream.patient:
        assert c.outputs.tokens[r.id] == expected_tokens(r, limit=c.limit(r))


@settings(BUSY, max_examples=10)
@given(streams())
def test_the_same_stream_makes_the_same_plans(stream: Stream) -> None:
    found = []
    for _ in range(2):
        c = stream.start()
        for step in range(40):
            stream.step(c, step)
        found.append([encode(plan) for plan in c.plans])
    assert found[0] == found[1]


def _endless(max_wait_s: float, steps: int) -> CheckedScheduler:
    """More important requests arrive than can be served."""
    c = CheckedScheduler((8,), max_running=4, max_wait_s=max_wait_s)
    c.add(request("patient", 4, 3), *[request(f"first{i}", 4, 6, priority=1) for i in range(4)])
    for step in range(steps):
        c.add(request(f"s{step:04d}", 4, 6, priority=1), now=float(step))
        c.step(now=float(step))
    return c


def test_without_a_limit_to_waiting_important_requests_would_starve_it() -> None:
    assert not _endless(1e6, 300).outputs.tokens.get("patient")


@pytest.mark.parametrize("max_wait_s", [0.0, 5.0, 50.0])
def test_it_is_served_soon_after_it_is_overdue(max_wait_s: float) -> None:
    c = _endless(max_wait_s, int(max_wait_s) + 20)
    assert c.outputs.tokens["patient"] == expected_tokens(request("patient", 4, 3))


def test_many_small_requests_do_not_keep_a_large_one_waiting() -> None:
    """The first that does not fit holds up the rest, equal priorities given."""
    c = CheckedScheduler((8,), max_running=8)
    c.add(*[request(f"a{i}", 4, 4) for i in range(4)])
    c.step()
    c.add(request("large", 28, 3))
    for step in range(40):
        c.add(request(f"s{step}", 4, 4))
        c.step()
    assert c.outputs.finish["large"].value == "length"


def test_a_request_that_was_preempted_late_is_overdue_at_once_and_keeps_its_cache_from_then_on() -> None:
    c = CheckedScheduler((8,), max_running=4, max_wait_s=MAX_WAIT_S)
    old = request("old", 4, 24)
    c.add(old)
    admissions = 0
    for step in range(80):
        if step > 3:
            c.add(request(f"s{step:04d}", 4, 12, priority=1), now=float(step))
        plan = c.step(now=float(step))
        admissions += plan is not None and old.seed in plan.sampling["seed"].tolist()
    assert admissions == 2, "preempted once, while it was young enough to give way"
    assert c.outputs.tokens["old"] == expected_tokens(old)


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_max_wait_s(wrong: float) -> None:
    with pytest.raises(ValueError, match="max_wait_s: "):
        EngineConfig(max_wait_s=wrong)
    assert EngineConfig(max_wait_s=0.0).max_wait_s == 0 and np.isfinite(EngineConfig().max_wait_s)
