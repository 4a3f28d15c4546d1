"""Every state of a switch × everything that can go wrong in it: it ends in the old or the new layout, never between,
serving goes on, and a later switch succeeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from splash_trt.config import Layout
from splash_trt.layout.switch import ABORTABLE, LEGAL, IllegalMove, Record, State, SwitchMachine
from splash_trt.plan import SAMPLE, StepResult
from splash_trt.request import FinishReason, Request
from tests.oracles.checked_scheduler import CheckedScheduler, request
from tests.oracles.simulated_ranks import expected_tokens

PAIRS = [
    (Layout.TP, Layout.DP),
    (Layout.DP, Layout.TP),
    (Layout.CP, Layout.DP),
    (Layout.DOP, Layout.CP),
    (Layout.DP, Layout.DOP),
]
STATES = [State.PREPARING, State.MIGRATING, State.ARMED, State.RETIRING, State.ABORTING]
DEADLINE = 1000.0


class Scene:
    """Requests that decode on two ranks, and a switch stopped in one of its states."""

    def __init__(self, before: Layout, after: Layout, state: State, plans_in_flight: int = 2) -> None:
        self.c = CheckedScheduler(
            (100, 100),
            full_pages=(50, 50),
            layout=before,
            layouts=tuple(Layout),
            migration_bytes=1,
            max_batch_tokens=300,
            plans_in_flight=plans_in_flight,
            switch_deadline_s=DEADLINE,
            switch_hold_s=DEADLINE * 2,
        )
        self.before, self.after, self.now = before, after, 0.0
        self.requests = [request(f"r{i}", n, 40) for i, n in enumerate((3, 8, 13))]
        self.extra: list[Request] = []
        if state is State.PREPARING:
            # TP: they leave a hole below the bound of all heads, into which the pages above have to move one by one.
            # Others: what would be there twice is too much for now.
            self.extra = [request(f"big{i}", 60, 1 if before is Layout.TP else 12) for i in range(4)]
        self.c.add(*self.extra, *self.requests)
        self.steps(4)
        self.c.scheduler.switch(after, "test")
        for _ in range(300):
            if state is State.ABORTING and self.c.switcher.state in ABORTABLE:
                self.c.scheduler.abort_switch("test")
            if self.c.switcher.state is state:
                break
            self.c.schedule(self.now)
            if self.c.switcher.state is state:
                break
            self.c.complete()
        assert self.c.switcher.state is state, (self.c.switcher.state, state)
        if self.c.num_in_flight == plans_in_flight:
            self.c.complete()

    @property
    def other(self) -> Layout:
        return next(layout for layout in self.c.config.allowed_layouts if layout not in (self.before, self.after))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.c.step(self.now)

    def end(self) -> Record:
        """Everything runs out; returns the record of the switch that was disturbed."""
        c = self.c
        record = c.switcher.records[0]
        for _ in range(500):
            if c.idle and not c.switcher.busy:
                break
            c.step(self.now)
        c.scheduler.check_idle()
        assert c.switcher.state is State.STEADY and record.ended
        for r in self.requests + self.extra:
            got, alone = c.outputs.tokens[r.id], expected_tokens(r, limit=c.limit(r))
            cancelled = c.outputs.finish[r.id] is FinishReason.CANCELLED
            assert got == (alone[: len(got)] if cancelled else alone)
        return record

    def a_later_switch_succeeds(self) -> None:
        c = self.c
        for layout in (*c.config.allowed_layouts, self.after):
            late = request(f"late{layout.value}{len(c.plans)}", 9, 12)
            c.add(late, now=self.now)
            c.step(self.now)
            c.scheduler.switch(layout, "later")
            c.settle(now=self.now)
            assert c.scheduler.layout is layout, c.switcher.records[-1]
            while not c.idle:
                c.step(self.now)
            assert c.outputs.tokens[late.id] == expected_tokens(late)
        c.scheduler.check_idle()
        assert all(r.ended for r in c.switcher.records)


def deadline(s: Scene) -> str:
    s.now += DEADLINE + 1
    return f"not done within {DEADLINE:g} s"


def operator(s: Scene) -> str:
    abortable = s.c.switcher.state in ABORTABLE
    assert s.c.scheduler.abort_switch("by hand") == abortable
    return "by hand"


def back(s: Scene) -> str:
    """A request for the layout that serves."""
    s.c.scheduler.switch(s.c.scheduler.layout, "stay")
    return "replaced: stay"


def another(s: Scene) -> str:
    s.c.scheduler.switch(s.other, "elsewhere")
    return "replaced: elsewhere"


def rank_error(s: Scene) -> str:
    s.c.failing = {1: "out of memory"}
    for _ in range(2):
        if s.c.switcher.state is not State.MIGRATING:
            break
        s.c.step(s.now)
    s.c.failing = {}
    return "rank 1 could not copy: out of memory"


def cancel(s: Scene) -> str:
    s.c.cancel("r1")
    return ""


def cancel_all(s: Scene) -> str:
    for r in s.requests + s.extra:
        s.c.cancel(r.id)
    return ""


def same_again(s: Scene) -> str:
    s.c.scheduler.switch(s.after, "again")
    return ""


ABORTS = [deadline, operator, back, another]
HARMLESS = [cancel, cancel_all, same_again]


def scenes(state: State, pairs: list[tuple[Layout, Layout]]) -> list[tuple[Layout, Layout]]:
    """DP → DOP needs no room and moves nothing: it never rests in its first two states."""
    resting = state in (State.ARMED, State.RETIRING, State.ABORTING)
    return [pair for pair in pairs if resting or pair != (Layout.DP, Layout.DOP)]


CASES = [(state, *pair) for state in STATES for pair in scenes(state, PAIRS)]


@pytest.mark.parametrize("fault", ABORTS)
@pytest.mark.parametrize(("state", "before", "after"), CASES)
def test_what_aborts_does_so_before_the_commit_only(
    fault: Callable[[Scene], str], state: State, before: Layout, after: Layout
) -> None:
    s = Scene(before, after, state)
    reason = fault(s)
    s.steps(1)
    record = s.end()
    if state in ABORTABLE:
        assert record.outcome == f"aborted: {reason}"
    elif state is State.RETIRING:
        assert record.outcome == "committed"
    else:
        assert record.outcome == "aborted: test"
    expected = after if state is State.RETIRING else before
    if fault is another:
        expected = s.other
    assert s.c.scheduler.layout is expected
    s.a_later_switch_succeeds()


@pytest.mark.parametrize("fault", HARMLESS)
@pytest.mark.parametrize(("state", "before", "after"), CASES)
def test_ends_and_cancels_do_not_stop_a_switch(
    fault: Callable[[Scene], str], state: State, before: Layout, after: Layout
) -> None:
    s = Scene(before, after, state)
    fault(s)
    record = s.end()
    if state is State.ABORTING:
        assert record.outcome == "aborted: test"
        assert s.c.scheduler.layout is (after if fault is same_again else before)
    else:
        assert record.outcome == "committed"
        assert len(s.c.switcher.records) == 1
    s.a_later_switch_succeeds()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize(("before", "after"), scenes(State.MIGRATING, PAIRS))
def test_a_ranks_error_aborts_and_names_it(before: Layout, after: Layout, plans_in_flight: int) -> None:
    s = Scene(before, after, State.MIGRATING, plans_in_flight)
    reason = rank_error(s)
    assert s.end().outcome == f"aborted: {reason}"
    assert s.c.scheduler.layout is before
    s.a_later_switch_succeeds()


@pytest.mark.parametrize(("before", "after"), scenes(State.MIGRATING, PAIRS))
def test_an_error_in_a_step_that_was_on_its_way_when_another_aborted_is_no_news(before: Layout, after: Layout) -> None:
    s = Scene(before, after, State.MIGRATING)
    s.c.failing = {0: "first", 1: "second"}
    s.steps(4)
    s.c.failing = {}
    assert s.end().outcome == "aborted: rank 0 could not copy: first"
    s.a_later_switch_succeeds()


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_request_that_ends_in_every_state(plans_in_flight: int) -> None:
    """One short request after the other, so that every state sees ends and arrivals."""
    for before, after in PAIRS:
        c = CheckedScheduler(
            (40, 40), layout=before, layouts=tuple(Layout), migration_bytes=1, plans_in_flight=plans_in_flight
        )
        requests = [request(f"r{i:02d}", 1 + i % 9, 1 + i % 5) for i in range(40)]
        c.add(request("long", 30, 60), *requests)
        for _ in range(4):
            c.step()
        c.scheduler.switch(after, "test")
        c.settle()
        assert c.scheduler.layout is after
        c.run()
        assert all(c.outputs.tokens[r.id] == expected_tokens(r) for r in requests)


def test_new_rows_lost_after_the_commit_are_computed_again() -> None:
    """What the last old plan failed to copy the new layout lacks; the plan that reads it is on its way already."""
    s = Scene(Layout.DP, Layout.TP, State.ARMED)
    s.c.failing = {1: "lost"}
    plan = s.c.schedule()
    assert plan is not None and len(plan.late_moves) and s.c.num_in_flight == 2
    s.c.complete()
    assert s.c.switcher.state is State.ARMED
    first = s.c.scheduler.schedule()  # not for these ranks: they would notice at once
    assert first is not None and first.epoch == 1
    s.c.complete()
    assert s.c.scheduler.layout is Layout.TP and s.c.scheduler.num_running == 0
    wanted = len(first.want_index)
    nonsense = msgspec.structs.replace(
        StepResult.empty(first.step), token=np.ones(wanted, np.int64), logprob=np.zeros(wanted)
    )
    assert wanted > 0 and s.c.scheduler.complete(nonsense) == [], "tokens made of lost rows were told"
    again = s.c.scheduler.schedule()
    assert again is not None and again.layout is Layout.TP and (again.start == 0).all() and len(again.sampling)


def test_a_prompt_computed_again_after_the_commit_is_scored_once() -> None:
    """Log-probabilities of its tokens that were planned, and never told, are told after all."""
    c = CheckedScheduler((100, 100), layout=Layout.DP, layouts=tuple(Layout), max_batch_tokens=6, max_running=4)
    scored = request("scored", 60, 2, prompt_logprobs=0)
    c.add(scored)
    c.step()
    c.scheduler.switch(Layout.TP, "test")
    while c.switcher.state is not State.ARMED:
        c.step()
    c.failing = {1 - c.scheduler.directory["scored"].placement.home: "lost"}
    plan = c.schedule()
    assert plan is not None and len(plan.late_moves) and c.num_in_flight == 2
    c.complete()
    first = c.scheduler.schedule()  # not for these ranks: they would notice at once
    assert first is not None and first.layout is Layout.TP and len(first.want_index) > 0
    c.complete()
    told = [entry.token for delta in c.outputs.deltas["scored"] for entry in delta.prompt_logprobs]
    assert c.scheduler.num_running == 0 and 0 < len(told) < 40, "the situation did not arise"
    in_flight = [first]
    while c.scheduler.has_requests:
        plan = c.scheduler.schedule()
        in_flight += [] if plan is None else [plan]
        done = in_flight.pop(0)
        wanted = len(done.want_index)
        result = msgspec.structs.replace(
            StepResult.empty(done.step),
            token=np.where(done.want_target == SAMPLE, 1, done.want_target),
            logprob=np.zeros(wanted),
            top_token=np.zeros((wanted, 0), np.int64),
            top_logprob=np.zeros((wanted, 0)),
        )
        for delta in c.scheduler.complete(result):
            told += [entry.token for entry in delta.prompt_logprobs]
    assert told == list(scored.prompt[1:])


def test_room_in_the_top_comes_back_only_when_no_plan_writes_heads_there() -> None:
    s = Scene(Layout.TP, Layout.DP, State.MIGRATING)
    plan = s.c.schedule()
    assert plan is not None and len(plan.weights), "heads are on their way"
    lowered = s.c.scheduler.directory.limits()
    before = s.c.scheduler.directory.free_pages()
    assert s.c.scheduler.abort_switch("test")
    assert (s.c.scheduler.directory.limits() > lowered).all()
    assert (s.c.scheduler.directory.free_pages() <= before).all(), "a page was free while heads may be written over it"
    s.c.run()
    assert (s.c.scheduler.directory.free_pages() > before).all()


def test_rows_of_a_request_that_gives_way_are_not_moved_any_more() -> None:
    """They were chosen for the very plan for which another request takes the pages that they are in."""
    c = CheckedScheduler((21, 40), layout=Layout.DP, layouts=(Layout.DP, Layout.CP), migration_bytes=1)
    c.add(request("low", 60, 12, priority=-1))
    c.run_until(lambda: "low" in c.outputs.tokens)
    c.add(request("other", 156, 3))  # keeps the others off rank 1
    c.step()
    for r in (request("high", 4, 40), request("higher", 6, 40)):
        c.add(r)
        c.step()
    c.cancel("other")
    assert [c.scheduler.directory[name].placement.home for name in ("low", "high", "higher")] == [0, 0, 0]
    c.scheduler.switch(Layout.CP, "test")
    before, plan = 0, None
    for _ in range(20):
        if c.scheduler.preemptions:
            break
        before = 0 if c.switcher.record is None else c.switcher.record.rows_moved
        plan = c.step()
    record = c.switcher.records[0]
    assert c.switcher.state is State.MIGRATING and record.rows_moved > before, "the situation did not arise"
    assert plan is not None and len(plan.moves) == 0
    c.run()
    assert record.outcome == "committed"


def test_stopping_also_forgets_what_waits_to_begin() -> None:
    s = Scene(Layout.TP, Layout.DP, State.RETIRING)
    s.c.scheduler.switch(Layout.CP, "test")
    assert s.c.scheduler.abort_switch("test") and not s.c.scheduler.abort_switch("test")
    s.c.run()
    assert s.c.scheduler.layout is Layout.DP


# The machine itself, and what is refused


@pytest.mark.parametrize(("state", "to"), list(itertools.product(State, State)))
def test_moves_that_are_not_listed_are_illegal(state: State, to: State) -> None:
    machine = SwitchMachine()
    record = Record(number=1, source="tp", target="dp", why="test", begin_step=0)
    for step in {
        State.STEADY: [],
        State.PREPARING: [State.PREPARING],
        State.MIGRATING: [State.PREPARING, State.MIGRATING],
        State.ARMED: [State.PREPARING, State.MIGRATING, State.ARMED],
        State.RETIRING: [State.PREPARING, State.MIGRATING, State.ARMED, State.RETIRING],
        State.ABORTING: [State.PREPARING, State.ABORTING],
    }[state]:
        machine.to(step, 1, 1.0, record)
    if to in LEGAL[state]:
        machine.to(to, 3, 2.5, record)
        assert machine.state is to
        if state is not State.STEADY:
            assert record.steps_in[state.value] == 2 and record.seconds_in[state.value] == 1.5
    else:
        with pytest.raises(IllegalMove, match=f"{state.value} -> {to.value} at step 3"):
            machine.to(to, 3, 2.5, record)
        assert machine.state is state


def test_what_a_deployment_may_not_do_is_refused() -> None:
    c = CheckedScheduler((9, 9), layouts=(Layout.DP,))
    with pytest.raises(ValueError, match="layout: cp is not one that this deployment may use: tp, dp"):
        c.scheduler.switch(Layout.CP, "test")
    with pytest.raises(ValueError, match="owners: requests have no owner in layout tp"):
        c.scheduler.switch(Layout.TP, "test", owners={"a": 0})
    with pytest.raises(ValueError, match="owners: 2 is not a rank from 0 to 1"):
        c.scheduler.switch(Layout.DP, "test", owners={"a": 2})
    assert not c.switcher.busy


def test_the_layout_that_serves_is_no_switch() -> None:
    c = CheckedScheduler((9, 9), layouts=tuple(Layout))
    c.scheduler.switch(Layout.TP, "test")
    assert not c.switcher.busy and not c.scheduler.abort_switch("test")
