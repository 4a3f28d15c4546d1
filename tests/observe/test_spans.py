"""Spans of requests through the SDK, as an exporter gets them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from splash_trt.frontend.metrics import Metrics
from splash_trt.link import Frames, Status
from splash_trt.observe.otel import OtelSpans
from splash_trt.observe.spans import check_endpoint, traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def frames(layout: str, epoch: int) -> Frames:
    status = Status(layout, epoch, "steady", None, 1.0, "auto", 1, 0, (1,), (64,), (128,))
    return Frames("first", epoch, 1, 0.1, status)


class Served:
    """Handlers behind the middleware, and the spans that came of them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = OtelSpans(provider, "splash-tiny")
        self.metrics = Metrics("splash-tiny", self.spans)
        self.metrics.on_frames(frames("tp", 0))
        self.waiting, self.go_on = asyncio.Event(), asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.spans.middleware])
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.wait)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/healthz", self.model)
        return app

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """Two answers to one prompt, of which one is cancelled; a switch in between."""
        first, second = self.metrics.request(10), self.metrics.request(10, same_prompt=True)
        await http.read()
        first.tokens(1)
        self.metrics.on_frames(frames("tp", 0))
        self.metrics.on_frames(frames("dp", 1))
        self.metrics.on_frames(frames("dp", 1))
        first.tokens(3)
        first.end("length")
        second.end("cancelled")
        return web.json_response({}, headers={"X-Request-Id": "mine"})

    async def wait(self, http: web.Request) -> web.StreamResponse:
        meter = self.metrics.request(5)
        self.waiting.set()
        try:
            await self.go_on.wait()
        finally:
            meter.end("cancelled")
        raise AssertionError("nobody goes on")

    async def model(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=int(http.query.get("status", 200)))

    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]

    def only(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


def serve(test: Callable[[Served, TestClient[web.Request, web.Application]], Awaitable[None]]) -> None:
    async def run() -> None:
        served = Served()
        # As the frontend has it: a client that goes away takes its handler along.
        server = TestServer(served.application(), handler_cancellation=True)
        async with TestClient(server) as client:
            await test(served, client)

    asyncio.run(run())


def test_a_request_with_a_parent() -> None:
    async def test(served: Served, client: TestClient[web.Request, web.Application]) -> None:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with client.post("/v1/chat/completions", data=b"secret prompt", headers=headers) as response:
            assert response.status == 200
        span = served.only("chat splash-tiny")
        assert span.context is not None and span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        assert span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
        assert span.attributes is not None and dict(span.attributes) == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "url.path": "/v1/chat/completions",
            "http.response.status_code": 200,
            "http.response.header.x-request-id": ("mine",),
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "splash-trt",
            "gen_ai.request.model": "splash-tiny",
            "gen_ai.response.model": "splash-tiny",
            "gen_ai.response.finish_reasons": ("length", "cancelled"),
            "gen_ai.usage.input_tokens": 10,
            "gen_ai.usage.output_tokens": 4,
        }
        first, switch = span.events
        assert first.name == "first_token" and switch.name == "layout_switch" and first.timestamp <= switch.timestamp
        about = {"splash.layout.source": "tp", "splash.layout.target": "dp", "splash.epoch": 1}
        assert dict(switch.attributes or {}) == about
        assert "secret" not in json.dumps(json.loads(span.to_json()))

    serve(test)


def test_a_client_that_goes_away() -> None:
    async def test(served: Served, client: TestClient[web.Request, web.Application]) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", data=b"x").__aenter__())
        await served.waiting.wait()
        assert served.names() == []
        asked.cancel()
        for _ in range(500):
            if served.names():
                break
            await asyncio.sleep(0.01)
        span = served.only("text_completion splash-tiny")
        assert span.status.status_code is StatusCode.ERROR and span.attributes is not None
        assert span.attributes["error.type"] == "client_gone"
        assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
        served.metrics.on_frames(frames("cp", 2))  # nobody is left to be told
        assert not span.events and not served.spans._live

    serve(test)


def test_other_routes_errors_and_probes() -> None:
    async def test(served: Served, client: TestClient[web.Request, web.Application]) -> None:
        for path in ("/v1/models/a/b?status=404", "/v1/models/c?status=503", "/healthz", "/nothing"):
            async with client.get(path, headers={"traceparent": "nonsense"}):
                pass
        assert served.names() == ["GET /v1/models/{model}", "GET /v1/models/{model}", "GET other"]
        found, failed, _ = served.exporter.get_finished_spans()
        assert found.status.status_code is StatusCode.UNSET and found.parent is None
        assert failed.status.status_code is StatusCode.ERROR
        assert failed.attributes is not None and failed.attributes["error.type"] == "503"
        assert "gen_ai.operation.name" not in failed.attributes

    serve(test)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="^otlp_endpoint: .*http://localhost:4318"):
        check_endpoint(endpoint)


def test_where_spans_go() -> None:
    check_endpoint("http://localhost:4318")
    assert traces_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_url("https://host/") == "https://host/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"


def test_without_the_package_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from splash_trt.frontend.metrics import Metrics
from splash_trt.observe.spans import check_endpoint
Metrics("m").request(1).end("stop")
try:
    check_endpoint("http://localhost:4318")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("otlp_endpoint: spans need OpenTelemetry") and "splash-trt[otel]" in done.stdout
