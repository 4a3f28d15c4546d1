"""Traces: events as the format has them, slices that close, bytes that agree with the switches' records, and files that
load whatever ended the run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from splash_trt.config import Layout
from splash_trt.layout.switch import Record
from splash_trt.observe.trace import COMMITS, MOVES, STEPS, SWITCH, StepTracer
from splash_trt.plan import Plan, StepResult
from tests.oracles.checked_scheduler import CheckedScheduler, request

Event = dict[str, Any]
FIELDS = {
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "B": {"ph", "name", "pid", "tid", "ts", "args"},
    "E": {"ph", "name", "pid", "tid", "ts"},
    "i": {"ph", "name", "pid", "tid", "ts", "s", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
}
STEP_S = 0.01


def load(path: Path) -> list[Event]:
    """As a viewer does: without the end, and without a torn last line."""
    text = path.read_text()
    if text.endswith("\n]\n"):
        events: list[Event] = json.loads(text)
        return events
    for whole in (text, text.rpartition("\n")[0]):
        try:
            return list(json.loads(whole.rstrip(",\n") + "]"))
        except json.JSONDecodeError:
            continue
    raise AssertionError(f"not even without its last line: {text[-200:]}")


def check(events: list[Event], *, complete: bool = True) -> None:
    """The schema; in each track times that never go back, slices that do not overlap, and as many ends as begins."""
    at: dict[tuple[int, int], float] = defaultdict(float)
    open_slices: dict[tuple[int, int], list[str]] = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["ts"] >= 0
        if event["ph"] in "MC":
            continue
        track = (event["pid"], event["tid"])
        assert track in named or event.get("s") == "g"
        assert event["ts"] >= at[track] - 0.2, event  # times are rounded to tenths of a microsecond
        at[track] = event["ts"] + event.get("dur", 0)
        if event["ph"] == "B":
            open_slices[track].append(event["name"])
        elif event["ph"] == "E":
            assert open_slices[track].pop() == event["name"]
    assert not complete or not any(open_slices.values())


def tracks(events: list[Event], ph: str, track: int) -> list[Event]:
    return [event for event in events if event["ph"] == ph and event["tid"] == track]


class Run:
    """A scheduler with simulated ranks, its steps a hundredth of a second each, watched by a tracer."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.c = CheckedScheduler(
            (40, 40, 40), full_pages=(30, 30, 30), layout=Layout.TP, layouts=tuple(Layout), migration_bytes=2048
        )
        sizes = self.c.sizes
        self.now = 50.0
        self.tracer = StepTracer(path, 3, sizes.row_bytes, sizes.itemsize, now=self.now, **more)
        self.plans: list[Plan] = []
        self.in_flight: list[Plan] = []

    def turn(self) -> None:
        c, switcher = self.c, self.c.switcher
        plan = c.schedule(self.now)
        self.tracer.planned(plan, switcher.state.value, switcher.record, self.now)
        self.now += STEP_S
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) == 2):
            result = replace(c._in_flight[0][0], seconds=STEP_S * 0.75)
            c.complete()
            self.tracer.completed(self.in_flight.pop(0), result, switcher.state.value, switcher.record, self.now)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    @property
    def records(self) -> list[Record]:
        return list(self.c.switcher.records)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "trace.json")
    run.c.add(*(request(name, 11, 85) for name in "abcde"))
    run.turns(10)
    for layout in (Layout.DP, Layout.CP, Layout.DOP, Layout.TP):
        run.c.scheduler.switch(layout, f"to {layout.name}")
        for _ in range(200):
            run.turn()
            if not run.c.switcher.busy:
                break
    run.turns(5)
    return run


def test_what_a_trace_tells(run: Run, tmp_path: Path) -> None:
    run.tracer.close()
    events = load(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text().endswith("\n]\n")
    check(events)
    done = {event["args"]["step"]: event for event in tracks(events, "X", STEPS)}
    for plan in run.plans[:-2]:
        event = done[plan.step]
        assert event["name"] == plan.layout.name.lower() and event["args"]["tokens"] == plan.num_tokens
        assert event["dur"] == pytest.approx(STEP_S * 0.75e6) and event["args"]["rows"] == plan.num_rows
    committed = [record for record in run.records if record.outcome == "committed"]
    assert len(committed) == 4
    states = [event for event in tracks(events, "B", SWITCH)]
    assert {event["args"]["number"] for event in states} == {record.number for record in committed}
    assert {"armed", "retiring"} <= {event["name"] for event in states}
    for rank in range(3):
        commits = [event for event in tracks(events, "i", COMMITS) if event["pid"] == rank]
        assert [event["name"] for event in commits] == [f"commit: {record.target}" for record in committed]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}


def test_bytes_are_those_of_the_switches_records(run: Run, tmp_path: Path) -> None:
    run.tracer.close()
    moves = tracks(load(tmp_path / "trace.json"), "X", MOVES)
    sent, received = (sum(event["args"][f"{way}_bytes"] for event in moves) for way in ("sent", "received"))
    planned = [record.bytes_between_ranks for record in run.records]
    assert sent == received == sum(sum(kinds.values()) for kinds in planned) > 0
    inside = sum(event["args"]["inside_bytes"] for event in moves)
    assert inside == sum(record.bytes_inside_ranks for record in run.records)
    assert sum(kinds["weights"] for kinds in planned) > 0 and {event["pid"] for event in moves} == {0, 1, 2}


def test_a_killed_run_leaves_a_file_that_loads(run: Run, tmp_path: Path) -> None:
    run.c.scheduler.switch(Layout.DP, "the last one")
    run.turn()
    path = tmp_path / "trace.json"
    whole = load(path)
    check(whole, complete=False)
    assert tracks(whole, "B", SWITCH)[-1]["args"]["why"] == "the last one"
    for cut in range(1, 200, 7):
        path.write_bytes(path.read_bytes()[:-cut])
        events = load(path)
        assert events == whole[: len(events)] and len(events) < len(whole)
        check(events, complete=False)


def test_the_size_is_bounded_and_the_latest_stays(tmp_path: Path) -> None:
    run = Run(tmp_path / "trace.json", max_bytes=20_000)
    run.c.add(*(request(name, 5, 30) for name in "abc"))
    run.turns(5)
    run.c.scheduler.switch(Layout.DP, "there")
    while run.c.scheduler.has_requests or run.c.switcher.busy or run.in_flight:
        run.turns(1)
        if run.c.scheduler.num_running < 3 and len(run.plans) < 300:
            run.c.add(request(f"r{len(run.plans)}", 5, 30))
        if len(run.plans) % 40 == 0:
            run.c.scheduler.switch(Layout((len(run.plans) // 40) % 4), "round")
    run.tracer.close()
    files = [tmp_path / "trace.json", tmp_path / "trace.json.previous"]
    assert sorted(tmp_path.iterdir()) == files
    for path in files:
        assert path.stat().st_size < 12_000
        check(load(path))
    steps = [event["args"]["step"] for path in reversed(files) for event in tracks(load(path), "X", STEPS)]
    assert steps == list(range(steps[0], run.plans[-1].step + 1)) and steps[0] > 1


def test_a_full_disk_ends_the_trace_and_nothing_else(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    file = run.tracer._file._file
    assert file is not None
    file.close()
    run.c.add(request("late", 5, 30))
    with open("/dev/full", "wb", buffering=0) as full:
        run.tracer._file._file = full
        run.turns(5)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    run.tracer.close()


def test_ranks_gaps_and_errors(tmp_path: Path) -> None:
    run = Run(tmp_path / "trace.json")
    run.c.add(request("a", 9, 40))
    run.turns(5)
    run.c.failing[2] = "no such page"
    run.c.scheduler.switch(Layout.DP, "there")
    run.turns(12)
    run.tracer.close()
    events = load(tmp_path / "trace.json")
    check(events)
    failed = [event for event in events if event["name"] == "copy failed"]
    assert failed and {event["pid"] for event in failed} == {2} and failed[0]["args"]["error"] == "no such page"
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1, 2}
    assert run.records[0].abort == "copy_failed"
    assert "aborting" in {event["name"] for event in tracks(events, "B", SWITCH)}


def test_an_async_step_begins_when_the_one_before_has_ended(tmp_path: Path) -> None:
    tracer = StepTracer(tmp_path / "trace.json", 1, 1, 1, now=0.0)
    empty = np.zeros(0, np.int32)
    rows: dict[str, Any] = {name: empty for name in ("slot", "start", "count", "home", "want_index", "counts")}
    wide: dict[str, Any] = {
        "token": np.zeros(0, np.int64),
        "want_target": np.zeros(0, np.int64),
        "absorbed": np.zeros(0, np.bool_),
    }
    plans = [Plan(step=step, epoch=0, layout=Layout.TP, **rows, **wide) for step in (1, 2)]
    for plan in plans:
        tracer.planned(plan, "steady", None, 0.0)
    for plan, now in zip(plans, (1.0, 2.0), strict=True):
        tracer.completed(plan, replace(StepResult.empty(plan.step), seconds=1.0), "steady", None, now)
    tracer.close()
    spans = [(event["ts"], event["dur"]) for event in tracks(load(tmp_path / "trace.json"), "X", STEPS)]
    assert spans == [(0.0, 1e6), (1e6, 1e6)]
