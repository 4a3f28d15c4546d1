"""Whatever switches, arrives, is cancelled or runs out of room: every request gets the tokens of a run of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splash_trt.config import Layout
from splash_trt.plan import encode
from splash_trt.request import FinishReason, Request
from tests.oracles.checked_scheduler import EOS, CheckedScheduler, request
from tests.oracles.simulated_ranks import VOCAB, expected_tokens

BUSY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
STEPS = 50


@dataclass
class Event:
    """What an operator does before a step. `fails`: a rank whose copies go wrong in that step."""

    layout: Layout | None = None
    owners: dict[str, int] = field(default_factory=dict)
    abort: bool = False
    fails: int | None = None


@dataclass
class Story:
    pages: tuple[int, ...]
    full_pages: tuple[int, ...]
    layout: Layout
    options: dict[str, object]
    heads: tuple[int, ...]
    arrivals: dict[int, list[Request]] = field(default_factory=dict)
    cancels: dict[int, list[str]] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        return [r for _, group in sorted(self.arrivals.items()) for r in group]

    def scheduler(self) -> CheckedScheduler:
        return CheckedScheduler(
            self.pages,
            full_pages=self.full_pages,
            layout=self.layout,
            heads=self.heads,
            layouts=tuple(Layout),
            **self.options,  # type: ignore[arg-type]
        )


@st.composite
def stories(draw: st.DrawFn, *, faults: bool = True) -> Story:
    num_ranks = draw(st.integers(1, 4))
    most = draw(st.sampled_from([5, 12, 30]))
    pages = tuple(draw(st.integers(3, most)) for _ in range(num_ranks))
    full_pages = tuple(draw(st.integers(2, limit)) for limit in pages)
    running = draw(st.integers(1, 6))
    page_tokens = draw(st.sampled_from([1, 2, 4]))
    options: dict[str, object] = {
        "page_tokens": page_tokens,
        "max_running": running,
        "max_batch_tokens": running + draw(st.integers(0, 12)),
        "plans_in_flight": draw(st.integers(1, 2)),
        "absorbed_tokens": draw(st.integers(1, 3)),
        "migration_bytes": draw(st.sampled_from([1, 64 * num_ranks, 64 * page_tokens * num_ranks, 1 << 20])),
        "switch_hold_s": draw(st.sampled_from([0.0, 5.0])),
        "switch_deadline_s": draw(st.sampled_from([4.0, 1000.0])),
    }
    heads = tuple(draw(st.integers(0, 2)) for _ in range(num_ranks))
    story = Story(pages, full_pages, draw(st.sampled_from(list(Layout))), options, heads)
    longest = story.scheduler().request_tokens - 1
    names = [f"r{index}" for index in range(draw(st.integers(1, 9)))]
    for name in names:
        size = draw(st.integers(1, max(1, min(longest, 40))))
        if size > longest:
            continue
        r = request(
            name,
            tuple((size * 31 + i * 7) % VOCAB for i in range(size)),
            draw(st.integers(1, 30)),
            priority=draw(st.sampled_from([0, 0, 0, 2])),
            deadline_s=draw(st.sampled_from([None, None, None, 15.0])),
            ignore_eos=draw(st.booleans()),
        )
        story.arrivals.setdefault(draw(st.integers(0, 25)), []).append(r)
        if draw(st.integers(0, 3)) == 0:
            story.cancels.setdefault(draw(st.integers(0, STEPS)), []).append(name)
    for _ in range(draw(st.integers(1, 8))):
        event = Event()
        kind = draw(st.sampled_from(["switch", "switch", "switch", "owners", "abort", *(["fault"] if faults else [])]))
        if kind == "abort":
            event.abort = True
        elif kind == "fault":
            event.fails = draw(st.integers(0, num_ranks - 1))
        elif kind == "owners":
            event.layout = draw(st.sampled_from([Layout.DP, Layout.DOP]))
            event.owners = {name: draw(st.integers(0, num_ranks - 1)) for name in names[:3]}
        else:
            event.layout = draw(st.sampled_from(list(Layout)))
        story.events[draw(st.integers(0, STEPS))] = event
    return story


def play(story: Story) -> CheckedScheduler:
    c = story.scheduler()
    for step in range(STEPS):
        now = float(step)
        c.add(*story.arrivals.get(step, []), now=now)
        for name in story.cancels.get(step, []):
            c.cancel(name)
        event = story.events.get(step, Event())
        if event.layout is not None:
            c.scheduler.switch(event.layout, "test", owners=event.owners)
        if event.abort:
            c.scheduler.abort_switch("test")
        # A rank whose late copies fail after everybody has acknowledged the rest is another test's subject.
        c.failing = {} if event.fails is None or c.switcher.state.value == "armed" else {event.fails: "test"}
        c.step(now=now)
    c.failing = {}
    c.run()
    c.settle()
    c.scheduler.check_idle()
    for r in story.requests:
        alone, got = expected_tokens(r, eos=(EOS,), limit=c.limit(r)), c.outputs.tokens[r.id]
        cancelled = c.outputs.finish[r.id] is FinishReason.CANCELLED
        assert got == (alone[: len(got)] if cancelled else alone)
        assert not cancelled or r.deadline_s is not None or any(r.id in names for names in story.cancels.values())
    for record in c.switcher.records:
        assert record.outcome == "committed" or record.outcome.startswith("aborted: "), record
    return c


@BUSY
@given(stories())
def test_switching_changes_no_token(story: Story) -> None:
    play(story)


@pytest.mark.nightly
@settings(BUSY, max_examples=5000, derandomize=False)
@given(stories())
def test_switching_changes_no_token_more(story: Story) -> None:
    play(story)


@settings(BUSY, max_examples=20)
@given(stories())
def test_the_same_input_makes_the_same_plans(story: Story) -> None:
    assert [encode(p) for p in play(story).plans] == [encode(p) for p in play(story).plans]
