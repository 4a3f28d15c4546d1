"""Metrics of several frontends, added up from the files that they write for each other."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from splash_trt.frontend import shared_metrics
from splash_trt.frontend.member import Member
from splash_trt.frontend.metrics import Metrics
from splash_trt.link import Decided, Frames, Status, SwitchReport, Totals

STATUS = Status("tp", 0, "steady", None, 1.0, "auto", 0, 0, (0,), (0,), (64,))
SWITCH: dict[str, object] = {"source": "tp", "target": "dp", "outcome": "done", "ended": "done", "stall_s": 0.002}


def member(folder: Path, number: int, count: int = 2) -> Metrics:
    about = Member(number=number, count=count, sockets=(), folder=str(folder), run="r", began_s=0.0, again=False)
    return Metrics("m", member=about)


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(metrics.text().decode()))
    assert len({family.name for family in families}) == len(families), "a family came twice"
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(metrics: Metrics, name: str) -> float:
    return sum(value for (sample, _), value in values(metrics).items() if sample == name)


def ended(metrics: Metrics, reason: str, num_tokens: int) -> None:
    meter = metrics.request(3)
    for _ in range(num_tokens):
        meter.tokens(1, queued_s=0.0)
    meter.end(reason)


def test_requests_are_added_up_and_what_all_are_told_is_not(tmp_path: Path) -> None:
    first, second = member(tmp_path, 0), member(tmp_path, 1)
    for metrics, num_tokens in ((first, 2), (second, 5)):
        metrics.on_frames(Frames("i", 1, 7, 0.1, STATUS))
        metrics.on_switch(SwitchReport("i", 1, SWITCH))
        ended(metrics, "stop", num_tokens)
        metrics.publish()
    for metrics in (first, second):
        assert total(metrics, "splash_output_tokens_total") == 7
        assert total(metrics, "splash_tokens_total") == 7
        assert total(metrics, "splash_switches_total") == 1
        assert total(metrics, "splash_request_output_tokens_count") == 2
        assert total(metrics, "splash_request_output_tokens_sum") == 7
        assert total(metrics, "vllm:generation_tokens_total") == 7
    bounds = [key[1] for key in values(first) if key[0] == "splash_request_output_tokens_bucket"]
    assert len(bounds) == len(set(bounds)) > 10


def test_who_takes_a_dead_ones_place_goes_on_from_its_counts(tmp_path: Path) -> None:
    other = member(tmp_path, 1)
    dead = member(tmp_path, 0)
    dead.on_frames(Frames("i", 1, 7, 0.1, STATUS, layout="tp"))
    dead.on_response("/a", 200)
    ended(dead, "stop", 4)
    dead.publish()
    before = {key: value for key, value in values(other).items() if not key[0].startswith("process_")}

    new = member(tmp_path, 0)
    for metrics in (new, other):
        seen = values(metrics)
        assert all(seen[key] >= value for key, value in before.items() if not key[0].endswith("_per_second"))
    new.on_frames(Frames("i", 2, 1, 0.1, STATUS, layout="dp"))
    new.on_response("/b", 200)
    ended(new, "stop", 1)
    seen = values(new)
    assert seen["splash_tokens_total", (("layout", "tp"),)] == 7
    assert seen["splash_tokens_total", (("layout", "dp"),)] == 1
    assert seen["splash_http_responses_total", (("code", "200"), ("path", "/a"))] == 1
    assert seen["splash_requests_total", (("reason", "stop"),)] == 2
    assert total(new, "splash_output_tokens_total") == 5
    assert total(new, "splash_inter_token_seconds_count") == 3
    # A third in that place knows the counts of both.
    assert total(member(tmp_path, 0), "splash_output_tokens_total") == 5


def test_a_rate_of_one_that_is_gone_is_none(tmp_path: Path) -> None:
    gone, there = member(tmp_path, 0), member(tmp_path, 1)
    own = gone._shared.publish()
    rate = next(family for family in own.requests if family.name == "splash_output_tokens_per_second")
    rate.samples = [(rate.name, {}, 40.0)]
    for age_s, told in ((0.0, 40.0), (shared_metrics.STALE_S + 1, 0.0)):
        own.now_s = time.monotonic() - age_s
        (tmp_path / "counts-0").write_bytes(shared_metrics.msgspec.msgpack.encode(own))
        assert total(there, "splash_output_tokens_per_second") == told
        assert (("process_open_fds", (("frontend", "0"),)) in values(there)) == (told > 0)


class Engine:
    """Tells those that listen, and counts for those that come."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.totals: Totals = {}
        self.num_switches = 0

    def welcomes(self, metrics: Metrics) -> None:
        metrics.on_frames(Frames(self.incarnation, 0, 0, 0.0, STATUS, totals=dict(self.totals)))
        for number in range(1, self.num_switches + 1):
            metrics.on_switch(SwitchReport(self.incarnation, number, SWITCH, is_past=True))

    def steps(self, num_tokens: int, *listeners: Metrics) -> None:
        """A step, a preemption, a decision and a switch."""
        about = Decided("tp", "dp", "crowd")
        frames = Frames(self.incarnation, 1, num_tokens, 0.5, STATUS, preemptions=1, decision=about)
        for key, count in frames.counts.items():
            self.totals[key] = self.totals.get(key, 0.0) + count
        self.num_switches += 1
        for metrics in listeners:
            metrics.on_frames(frames)
            metrics.on_switch(SwitchReport(self.incarnation, self.num_switches, SWITCH))


COUNTERS = ("steps", "preemptions", "decisions", "switches")


def engine_counts(metrics: Metrics) -> list[float]:
    """Of COUNTERS, which are the same, tokens, seconds; checked against the histograms."""
    (steps,) = {total(metrics, f"splash_{name}_total") for name in COUNTERS}
    tokens = total(metrics, "splash_tokens_total")
    assert total(metrics, "splash_step_tokens_count") == total(metrics, "splash_switch_stall_seconds_count") == steps
    assert total(metrics, "splash_step_tokens_sum") == tokens
    return [steps, tokens, total(metrics, "splash_step_seconds_total")]


def test_what_the_engine_told_while_nobody_counted_is_counted_once(tmp_path: Path) -> None:
    engine, first, other = Engine("i"), member(tmp_path, 0), member(tmp_path, 1)
    for metrics in (first, other):
        engine.welcomes(metrics)
    engine.steps(7, first, other)
    first.publish()
    engine.steps(5, first, other)  # which it does not come to leave for the others
    engine.steps(3, other)
    again = member(tmp_path, 0)
    assert engine_counts(again) == engine_counts(other) == [1, 7, 0.5]
    for _ in range(2):  # as after a connection that broke
        engine.welcomes(again)
        assert engine_counts(again) == engine_counts(other) == [3, 15, 1.5]
    engine.steps(1, again, other)
    assert engine_counts(again) == engine_counts(other) == [4, 16, 2.0]
    bucket = values(again)["splash_step_tokens_bucket", (("le", "4.0"),)]
    assert bucket == 2, "steps of 3 and of 1 tokens"
    assert total(again, "splash_engine_restarts_total") == 0 and len(again.switches()) == 4


def test_another_engine_that_came_while_nobody_counted_adds_to_what_was_counted(tmp_path: Path) -> None:
    engine, later, first = Engine("i"), Engine("j"), member(tmp_path, 0)
    engine.welcomes(first)
    engine.steps(7, first)
    first.publish()
    later.steps(5)
    again = member(tmp_path, 0)
    later.welcomes(again)
    later.steps(1, again)
    assert engine_counts(again) == [3, 13, 1.5] and total(again, "splash_engine_restarts_total") == 1
    again.on_restart()
    latest = Engine("k")
    latest.welcomes(again)
    latest.steps(2, again)
    assert engine_counts(again) == [4, 15, 2.0] and total(again, "splash_engine_restarts_total") == 2


def test_alone_it_answers_for_itself(tmp_path: Path) -> None:
    metrics = Metrics("m")
    ended(metrics, "stop", 2)
    assert total(metrics, "splash_output_tokens_total") == 2
    assert ("process_open_fds", ()) in values(metrics)
    assert not list(tmp_path.iterdir())
