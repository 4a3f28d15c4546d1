"""Routes for operators: layout, switches, metrics; and messages from the link that are not valid."""

from __future__ import annotations

import json

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from splash_trt import link
from splash_trt.link import Frames, Status, SwitchReport
from splash_trt.request import TokenDelta
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until, wait_until_ready


def record(number: int, **changed: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "number": number,
        "source": "tp",
        "target": "dp",
        "why": "a test",
        "ended": True,
        "outcome": "committed",
        "bytes_between_ranks": {"weights": 100, "pages": 20, "new_rows": 3},
        "bytes_inside_ranks": 7,
    }
    return {**fields, **changed}


def metrics(server: FrontendProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = server.ask("GET", "/metrics").data.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}


def labelled(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def test_layout(server: FrontendProcess, engine: FakeEngine) -> None:
    about = server.ask("GET", "/v1/layout").json
    assert about["layout"] == engine.layout and about["mode"] == "auto" and about["num_ranks"] == 2
    assert about["layouts"] == ["tp", "dp", "cp", "dop"]
    room = {"tokens_per_rank": [4096, 4096], "tokens_total": 8192, "tokens_longest_request": 4096}
    assert about["capacity"]["dp"] == room
    assert about["status"]["switch"] == "steady" and about["status"]["total_tokens"] == [4096, 4096]
    try:
        answer = server.ask("POST", "/v1/layout", {"layout": "dp", "pin": True})
        assert answer.status == 200 and answer.json["accepted"] is True
        wait_until(lambda: server.ask("GET", "/v1/layout").json["layout"] == "dp")
        assert server.ask("GET", "/v1/layout").json["mode"] == "pinned"
        assert server.ask("POST", "/v1/layout", {"layout": "auto"}).status == 200
        wait_until(lambda: server.ask("GET", "/v1/layout").json["mode"] == "auto")
        engine.layout_error = "layout: 'cp' is not possible while a switch is under way"
        refused = server.ask("POST", "/v1/layout", {"layout": "cp"})
        assert refused.status == 400 and refused.json["error"]["message"] == engine.layout_error
        assert refused.json["error"]["param"] == "layout"
    finally:
        engine.layout_error = None
    for body, param in (
        ({"layout": "xp"}, "layout"),
        ({}, "layout"),
        ({"layout": "auto", "pin": True}, "pin"),
        ({"layout": "dp", "pin": 1}, "pin"),
        ({"layout": "dp", "now": True}, "now"),
    ):
        refused = server.ask("POST", "/v1/layout", body)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_website_cannot_switch(server: FrontendProcess, engine: FakeEngine, kind: str | None) -> None:
    """A browser sends these kinds, and none, to any server without asking it first."""
    connection, before = server.connect(), engine.layout
    try:
        headers = {} if kind is None else {"Content-Type": kind}
        connection.request("POST", "/v1/layout", b'{"layout": "cp"}', headers)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
    finally:
        connection.close()
    assert (response.status, error["param"], error["type"]) == (415, "Content-Type", "invalid_request_error")
    assert "must be application/json" in error["message"] and engine.layout == before
    typed = {"Content-Type": "application/json; charset=utf-8"}
    assert server.ask("POST", "/v1/layout", {"layout": "auto"}, **typed).status == 200


def test_switches(server: FrontendProcess, engine: FakeEngine) -> None:
    under_way = record(1, ended=False, outcome="under way")
    for number, fields in ((1, under_way), (1, record(1)), (1, record(1, stall_s=0.5))):
        engine.send(SwitchReport("first", number, fields))
    engine.send(SwitchReport("first", 2, record(2, target="cp", outcome="aborted: no room on rank 1")))
    wait_until(lambda: len(server.ask("GET", "/v1/switches").json["data"]) == 2)
    newest, oldest = server.ask("GET", "/v1/switches").json["data"]
    assert newest["number"] == 2 and oldest["stall_s"] == 0.5 and oldest["why"] == "a test"
    seen = metrics(server)
    name = "splash_switches_total"
    assert seen[name, labelled(source="tp", target="dp", outcome="committed")] == 1
    assert seen[name, labelled(source="tp", target="cp", outcome="aborted")] == 1
    assert seen["splash_switch_bytes_total", labelled(kind="weights")] == 200
    assert seen["splash_switch_bytes_total", labelled(kind="inside")] == 14


def test_metrics(server: FrontendProcess, engine: FakeEngine) -> None:
    before = metrics(server)
    answer = server.ask("POST", "/v1/completions", {"prompt": [[7, 8, 9], [7]], "max_tokens": 10})
    assert answer.status == 200
    server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 0})
    seen = metrics(server)

    def grew(name: str, **labels: str) -> float:
        return seen[name, labelled(**labels)] - before.get((name, labelled(**labels)), 0)

    assert grew("splash_output_tokens_total") == 20 and grew("splash_prompt_tokens_total") == 4
    assert grew("splash_tokens_total", layout=engine.layout) == 20
    assert 10 <= grew("splash_steps_total", layout=engine.layout) <= 20
    assert grew("splash_requests_total", reason="length") == 2
    assert grew("splash_time_to_first_token_seconds_count") == 2
    assert grew("splash_time_per_output_token_seconds_count") == 2
    assert grew("splash_request_seconds_count") == 2
    assert grew("splash_http_responses_total", path="/v1/completions", code="200") == 1
    assert grew("splash_http_responses_total", path="/v1/completions", code="400") == 1
    assert seen["splash_running_requests", frozenset()] == 0 and seen["splash_waiting_requests", frozenset()] == 0
    for rank in ("0", "1"):
        assert seen["splash_rank_cache_total_tokens", labelled(rank=rank)] == 4096
        assert seen["splash_rank_cache_used_tokens", labelled(rank=rank)] == 0
        assert seen["splash_rank_running_requests", labelled(rank=rank)] == 0
    assert seen["splash_layout", labelled(layout=engine.layout, mode="auto")] == 1


def test_metrics_count_a_prompt_once(server: FrontendProcess) -> None:
    """As usage does, and also where the prompt is all that was asked for."""
    for body, num_requests, num_output in (
        ({"prompt": [7, 8, 9], "max_tokens": 2, "n": 3}, 3, 6),
        ({"prompt": [7, 8, 9], "max_tokens": 0, "echo": True}, 1, 0),
    ):
        before = metrics(server)
        usage = server.ask("POST", "/v1/completions", body).json["usage"]
        seen = metrics(server)
        grew = {name: value - before.get((name, labels), 0) for (name, labels), value in seen.items() if not labels}
        assert grew["splash_prompt_tokens_total"] == usage["prompt_tokens"] == 3
        assert grew["splash_output_tokens_total"] == usage["completion_tokens"] == num_output
        for name in ("splash_request_seconds", "splash_request_prompt_tokens", "splash_request_output_tokens"):
            assert grew[f"{name}_count"] == num_requests
        assert grew["splash_request_prompt_tokens_sum"] == 3 * num_requests


def test_link_garbage_and_frames_of_another_engine(address: str) -> None:
    engine = FakeEngine(address, ready_message(400))
    engine.start()
    frontend = start_frontend(address)
    try:
        wait_until_ready(frontend)
        engine.paused.set()
        connection = frontend.connect()
        body = {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True}
        connection.request("POST", "/v1/completions", msgspec.json.encode(body))
        wait_until(lambda: engine.submitted)
        name = engine.submitted[0].id
        status = Status("dp", 9, "steady", None, 1.0, "auto", 0, 0, (0, 0), (0, 0), (1, 1))
        for data in (b"", b"nonsense", b"\xc1", b"\x81\xa4type", b"\x91" * 5000, link.encode({"type": "Frames"})):
            engine.send_raw(data)
        engine.send_raw(b"\x82\xa4type\xa6Frames\xa3foo" + b"\x91" * 100_000)
        engine.send(Frames("another", 1, 1, 0.1, status, (TokenDelta(name, (99,)),)))
        engine.send(Frames("first", 1, 1, 0.1, status, (TokenDelta("unknown", (99,)),)))
        engine.paused.clear()
        answer = msgspec.json.decode(connection.getresponse().read())
        assert answer["choices"][0]["token_ids"] == [5, 6, 5]
        wait_until(lambda: any("of another engine" in line for line in frontend.log))
        assert sum("ignored what the engine sent" in line for line in frontend.log) == 7
        # Another engine says hello over the same link: what was under way has ended, what comes later goes on.
        engine.paused.set()
        connection.request("POST", "/v1/completions", msgspec.json.encode({**body, "max_tokens": 2}))
        wait_until(lambda: len(engine.submitted) == 2)
        engine.send(ready_message(400, "second"))
        refused = connection.getresponse()
        assert refused.status == 500 and b"engine_restarted" in refused.read()
        assert frontend.ask("GET", "/healthz").status == 200
    finally:
        engine.stop()
        frontend.end()
