"""A frontend's spans as a collector gets them, and its log as a machine reads it."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from splash_trt.frontend.options import parse
from tests.frontend.fake_engine import FakeEngine, ready_message
from tests.frontend.servers import FrontendProcess, start_frontend, wait_until, wait_until_ready

TRACE = "0af7651916cd43dd8448eb211c80319c"
SECRET = "a prompt that is nobody's business"


class Collector(HTTPServer):
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Span] = []
        super().__init__(("127.0.0.1", 0), Exported)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Exported(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
        request = ExportTraceServiceRequest.FromString(data)
        self.server.paths.append(self.path)
        self.server.spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def engine(address: str) -> Iterator[FakeEngine]:
    engine = FakeEngine(address, ready_message(400))
    engine.start()
    yield engine
    engine.stop()


def end_in_order(frontend: FrontendProcess) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    frontend.process.terminate()
    assert frontend.wait_for_exit(60.0) == 0
    return time.monotonic() - began


def test_a_collector_gets_the_spans(address: str, engine: FakeEngine) -> None:
    collector = Collector()
    frontend = start_frontend(address, "--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}")
    try:
        wait_until_ready(frontend)
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        body = {"prompt": [5, 6], "max_tokens": 3, "n": 2, "stream": True}
        assert frontend.ask("POST", "/v1/completions", body, **headers).status == 200
        assert frontend.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 0}).status == 400
        assert frontend.ask("GET", "/v1/models").status == 200
        end_in_order(frontend)
    finally:
        frontend.end()
        collector.shutdown()
        collector.server_close()
    assert set(collector.paths) == {"/v1/traces"}
    answered, refused, models = collector.spans
    assert answered.trace_id.hex() == TRACE and answered.name == "text_completion echo" == refused.name
    assert models.name == "GET /v1/models"
    values = {pair.key: pair.value for pair in answered.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == 2  # one prompt, whatever n is
    assert values["gen_ai.usage.output_tokens"].int_value == 6
    assert [v.string_value for v in values["gen_ai.response.finish_reasons"].array_value.values] == ["length"] * 2
    assert [event.name for event in answered.events] == ["first_token"] * 2
    assert {pair.key: pair.value.int_value for pair in refused.attributes}["http.response.status_code"] == 400


def test_a_collector_that_is_not_there_holds_nothing_up(address: str, engine: FakeEngine) -> None:
    frontend = start_frontend(address, "--otlp-endpoint", "http://127.0.0.1:9")
    try:
        wait_until_ready(frontend)
        assert frontend.ask("POST", "/v1/completions", {"prompt": [5], "max_tokens": 2}).status == 200
        assert end_in_order(frontend) < 20
    finally:
        frontend.end()


def test_the_log_is_json_and_has_no_prompt_in_it(address: str, engine: FakeEngine) -> None:
    frontend = start_frontend(address, "--log-format", "json", "--log-level", "debug")
    try:
        wait_until_ready(frontend)
        for body in ({"prompt": SECRET}, {"prompt": [5], SECRET: 1}, {"prompt": [5], "model": SECRET}):
            assert frontend.ask("POST", "/v1/completions", body).status in (400, 404)
        engine.send(ready_message(400, "second"))
        wait_until(lambda: any("another engine" in line for line in frontend.log))
        end_in_order(frontend)
    finally:
        frontend.end()
    lines = [json.loads(line) for line in frontend.log]
    assert {line["source"] for line in lines} == {"frontend"} and SECRET not in "".join(frontend.log)
    refused = [line for line in lines if line["message"] == "refused"]
    assert [(line["level"], line["status"], line["path"]) for line in refused] == [
        ("debug", 400, "/v1/completions"),
        ("debug", 400, "/v1/completions"),
        ("debug", 404, "/v1/completions"),
    ]
    assert refused[2]["code"] == "model_not_found"


def test_what_cannot_be_an_endpoint() -> None:
    with pytest.raises(ValueError, match="^otlp_endpoint: 'nonsense' .*http://localhost:4318"):
        parse(["--engine", "ipc:///x", "--model-name", "x", "--otlp-endpoint", "nonsense"])
