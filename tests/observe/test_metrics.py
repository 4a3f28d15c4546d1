"""What /metrics says after a script of frames, switches, requests and a restart: every number exactly once."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from splash_trt.frontend.engine_client import Receiver
from splash_trt.frontend.errors import ApiError, engine_ended
from splash_trt.frontend.generation import Generation
from splash_trt.frontend.metrics import CONTENT_TYPE, Metrics
from splash_trt.layout.switch import Abort, Record
from splash_trt.link import Decided, Frames, LayoutCapacity, Ready, Status, SwitchReport
from splash_trt.observe.compat import ALIASES
from splash_trt.request import Request, SamplingParams, TokenDelta

STATUS = Status("dp", 3, "migrating", "cp", 0.25, "auto", 5, 2, (3, 2), (640, 64), (1024, 1024))
READY = Ready("first", 400, 4096, (1,), 2, ("tp", "dp"), {"dp": LayoutCapacity((1024, 1024), 2048, 1024)})


class Seen:
    """Samples by name and labels."""

    def __init__(self, metrics: Metrics) -> None:
        self.families = list(text_string_to_metric_families(metrics.text().decode()))
        samples = [sample for family in self.families for sample in family.samples]
        self.samples = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
        assert len(self.samples) == len(samples), "a sample comes twice"

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def has(self, name: str) -> bool:
        return any(name == key[0] for key in self.samples)


def frames(**changed: object) -> Frames:
    fields: dict[str, object] = {"incarnation": "first", "step": 1, "num_tokens": 8, "seconds": 0.5, "status": STATUS}
    return Frames(**{**fields, **changed})  # type: ignore[arg-type]


def record(number: int, **changed: object) -> Record:
    fields: dict[str, object] = {"source": "tp", "target": "dp", "why": "a test", "begin_step": 4}
    return Record(number=number, **{**fields, **changed})  # type: ignore[arg-type]


def report(metrics: Metrics, record: Record, incarnation: str = "first") -> None:
    metrics.on_switch(SwitchReport(incarnation, record.number, msgspec.to_builtins(record)))


def committed(number: int, **changed: object) -> Record:
    return record(
        number,
        ended=True,
        outcome="committed",
        bytes_between_ranks={"weights": 2048, "pages": 512, "new_rows": 0},
        bytes_inside_ranks=64,
        seconds_in={"preparing": 0.25, "migrating": 1.5, "armed": 0.125, "retiring": 0.125},
        slowdown=0.25,
        **changed,
    )


def test_steps_decisions_and_preemptions() -> None:
    metrics = Metrics("m")
    for layout in ("tp", "tp", "dp"):
        metrics.on_frames(frames(layout=layout))
    metrics.on_frames(frames(step=0, num_tokens=0, seconds=0.0, preemptions=2))
    metrics.on_frames(frames(num_tokens=0, decision=Decided("tp", "dp", "crowd")))
    seen = Seen(metrics)
    # By the layout that the step ran in, not by the one that the status tells of.
    assert seen("splash_steps_total", layout="tp") == 2 and seen("splash_tokens_total", layout="tp") == 16
    assert seen("splash_step_seconds_total", layout="tp") == 1 and seen("splash_steps_total", layout="dp") == 1
    assert seen("splash_step_tokens_count") == 3 and seen("splash_step_tokens_sum") == 24
    assert seen("splash_decisions_total", source="tp", target="dp", kind="crowd") == 1
    assert seen("splash_preemptions_total") == 2
    assert seen("vllm:num_preemptions_total", model_name="m") == 2
    assert seen("vllm:iteration_tokens_total_sum", model_name="m") == 24


def test_gauges() -> None:
    metrics = Metrics("m")
    assert not Seen(metrics).has("splash_running_requests")  # before there is an engine
    metrics.watch(lambda: STATUS, lambda: READY)
    seen = Seen(metrics)
    assert [seen("splash_rank_cache_used_tokens", rank=rank) for rank in "01"] == [640, 64]
    assert [seen("splash_rank_cache_free_tokens", rank=rank) for rank in "01"] == [384, 960]
    assert [seen("splash_rank_cache_total_tokens", rank=rank) for rank in "01"] == [1024, 1024]
    assert [seen(f"splash_cache_{name}_tokens") for name in ("used", "free", "total")] == [704, 1344, 2048]
    assert [seen("splash_rank_running_requests", rank=rank) for rank in "01"] == [3, 2]
    assert seen("splash_running_requests") == 5 and seen("splash_waiting_requests") == 2
    assert seen("splash_layout", layout="dp", mode="auto") == 1 and seen("splash_epoch") == 3
    assert seen("splash_switch_progress", state="migrating", target="cp") == 0.25
    assert seen("splash_layout_capacity_tokens", layout="dp") == 2048
    assert seen("splash_layout_request_tokens", layout="dp") == 1024
    for name, value in (
        ("vllm:num_requests_running", 5),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 704 / 2048),
        ("sglang:num_running_reqs", 5),
        ("sglang:num_queue_reqs", 2),
        ("sglang:token_usage", 704 / 2048),
        ("sglang:gen_throughput", 0),
    ):
        assert seen(name, model_name="m") == pytest.approx(value)


def test_a_switch_is_counted_once_however_often_it_is_reported() -> None:
    metrics = Metrics()
    ends = {"source": "tp", "target": "dp"}
    report(metrics, record(1))
    assert metrics.switches()[0]["outcome"] == "under way" and not Seen(metrics).has("splash_switches_total")
    report(metrics, committed(1))
    seen = Seen(metrics)
    assert seen("splash_switches_total", outcome="committed", **ends) == 1
    assert not seen.has("splash_switch_stall_seconds_count")
    report(metrics, committed(1, stall_s=0.25))
    report(metrics, committed(1, stall_s=0.25))
    aborted = record(2, ended=True, outcome="aborted: no room: rank 1 lacks 3 pages", abort=Abort.NO_ROOM.value)
    report(metrics, aborted)
    seen = Seen(metrics)
    assert seen("splash_switches_total", outcome="committed", **ends) == 1
    assert seen("splash_switches_total", outcome="aborted", **ends) == 1
    assert seen("splash_switch_aborts_total", reason="no_room", **ends) == 1
    assert seen("splash_switch_stall_seconds_count", **ends) == 1
    assert seen("splash_switch_stall_seconds_sum", **ends) == 0.25
    assert seen("splash_switch_step_time_ratio_sum", **ends) == 1.25
    assert seen("splash_switch_seconds_sum", outcome="committed", **ends) == 2
    assert seen("splash_switch_state_seconds_sum", state="migrating", **ends) == 1.5
    assert seen("splash_switch_state_seconds_count", state="armed", **ends) == 1
    for kind, total in (("weights", 2048), ("pages", 512), ("new_rows", 0), ("inside", 64)):
        assert seen("splash_switch_moved_bytes_sum", kind=kind, **ends) == total
        assert seen("splash_switch_bytes_total", kind=kind) == total
    assert seen("splash_switch_moved_bytes_bucket", kind="weights", le="0.0", **ends) == 1  # the aborted one's 0
    assert [entry["number"] for entry in metrics.switches()] == [2, 1]


def test_another_engine_adds_to_what_was_counted() -> None:
    metrics = Metrics()
    report(metrics, committed(1, stall_s=0.5))
    metrics.on_frames(frames(layout="tp"))
    metrics.on_restart()
    assert metrics.switches() == []
    report(metrics, committed(1, stall_s=0.25), "second")
    metrics.on_frames(frames(incarnation="second", layout="tp"))
    seen = Seen(metrics)
    assert seen("splash_switches_total", source="tp", target="dp", outcome="committed") == 2
    assert seen("splash_switch_stall_seconds_sum", source="tp", target="dp") == 0.75
    assert seen("splash_steps_total", layout="tp") == 2 and seen("splash_engine_restarts_total") == 1


def test_requests() -> None:
    metrics = Metrics("m")
    done, cancelled, unstarted = (metrics.request(10) for _ in range(3))
    assert done.tokens(1, queued_s=0.0) and not done.tokens(0) and not done.tokens(3)
    done.end("length")
    assert cancelled.tokens(2)
    cancelled.end("cancelled")
    unstarted.end("error")
    seen = Seen(metrics)
    for reason, finished, count in (
        ("length", "length", 1),
        ("cancelled", "abort", 1),
        ("error", "error", 1),
        ("stop", "stop", 0),
    ):
        assert seen("splash_requests_total", reason=reason) == count
        assert seen("vllm:request_success_total", model_name="m", finished_reason=finished) == count
    assert seen("sglang:num_requests_total", model_name="m") == 3
    assert seen("sglang:num_aborted_requests_total", model_name="m") == 1
    assert seen("vllm:prompt_tokens_total", model_name="m") == seen("splash_prompt_tokens_total") == 20
    assert seen("vllm:generation_tokens_total", model_name="m") == seen("splash_output_tokens_total") == 6
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 3),
        ("e2e_request_latency_seconds", 1),
    ):
        for system in ("vllm", "sglang"):
            assert seen(f"{system}:{name}_count", model_name="m") == count
            assert seen(f"{system}:{name}_bucket", model_name="m", le="+Inf") == count
    for name in ("queue", "prefill", "decode", "inference"):
        assert seen(f"vllm:request_{name}_time_seconds_count", model_name="m") == 1
    assert seen("vllm:request_time_per_output_token_seconds_count", model_name="m") == 1
    assert seen("splash_request_output_tokens_sum") == 4 and seen("splash_request_prompt_tokens_sum") == 10


def test_every_alias_has_its_source_and_its_type() -> None:
    metrics = Metrics("m")
    metrics.watch(lambda: STATUS, lambda: READY)
    families = {family.name: family for family in Seen(metrics).families}
    for alias in ALIASES:
        assert families[alias.name].type == families[alias.source].type, alias
        ours = {sample.name.removeprefix(alias.source) for sample in families[alias.source].samples}
        theirs = {sample.name.removeprefix(alias.name) for sample in families[alias.name].samples}
        assert theirs <= ours and theirs, alias
        assert all(sample.labels["model_name"] == "m" for sample in families[alias.name].samples)
    assert len({alias.name for alias in ALIASES}) == len(ALIASES)
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_requests_of_an_engine_that_ended_are_errors() -> None:
    class Gone:
        def submit(self, request: Request, receiver: Receiver, index: int) -> None:
            receiver.put(index, TokenDelta(request.id, (7,)))
            receiver.fail(engine_ended())
            receiver.flush()

        def cancel(self, request_id: str) -> None: ...

    metrics, gone = Metrics(), Gone()
    requests = [Request(id=name, prompt=(1, 2), sampling=SamplingParams(max_tokens=3)) for name in "ab"]
    answers: Any = [SimpleAnswer(), SimpleAnswer()]
    engine: Any = gone
    generation = Generation(engine, metrics, requests, answers)

    async def run() -> None:
        generation.submit()
        with pytest.raises(ApiError, match="the engine ended"):
            async for _ in generation.run():
                pass
        generation.close()

    asyncio.run(run())
    seen = Seen(metrics)
    assert seen("splash_requests_total", reason="error") == 2 and seen("splash_requests_total", reason="cancelled") == 0
    assert seen("splash_output_tokens_total") == 2


class SimpleAnswer:
    """Counts tokens."""

    finish = None

    def __init__(self) -> None:
        self.num_tokens = 0

    def add(self, delta: TokenDelta) -> None:
        self.num_tokens += len(delta.tokens)


def test_the_documentation_names_every_metric_and_no_other() -> None:
    metrics = Metrics("m")
    metrics.watch(lambda: STATUS, lambda: READY)
    ours = {family.name for family in metrics._registry.collect() if not family.name.startswith("process_")}
    families = Seen(metrics).families
    exposed = {
        f.name: f.type for f in families if not f.name.startswith("process_") and not f.name.endswith("_created")
    }
    assert ours <= set(exposed)
    names = {f"{name}_total" if kind == "counter" else name for name, kind in exposed.items()}
    text = (Path(__file__).resolve().parents[2] / "docs" / "observing.md").read_text()
    assert set(re.findall(r"`((?:splash_|vllm:|sglang:)\w+)`", text)) == names
