"""One OpenTelemetry span for each HTTP request, sent to an OTLP collector over HTTP by a thread of the SDK.

Names and attributes: OpenTelemetry's semantic conventions for HTTP servers and for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/). No prompt and no answer is in a span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from splash_trt.link import Status
from splash_trt.observe.spans import Span, Spans, traces_url
from splash_trt.version import __version__

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
UNTRACED = frozenset({"/metrics", "/healthz", "/health", "/readyz"})
"""Paths without spans, since machines poll them every few seconds."""
EXPORT_S = 2.0  # a collector that does not answer must not hold up the end of the process for longer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def open_spans(endpoint: str, model_name: str) -> OtelSpans:
    """Spans that are sent to a collector, in batches."""
    resource = Resource.create({"service.name": "splash-trt", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_S)))
    return OtelSpans(provider, model_name)


class RequestSpan(Span):
    """One HTTP request's span, from its headers to the end of its answer."""

    def __init__(self, span: trace.Span) -> None:
        self.span = span
        self._usage = {"gen_ai.usage.input_tokens": 0, "gen_ai.usage.output_tokens": 0}
        self._reasons: list[str] = []

    def first_token(self) -> None:
        self.span.add_event("first_token")

    def answered(self, input_tokens: int, output_tokens: int, reason: str) -> None:
        self._usage["gen_ai.usage.input_tokens"] += input_tokens
        self._usage["gen_ai.usage.output_tokens"] += output_tokens
        self._reasons.append(reason)

    def end(self, status: int | None, request_id: str | None) -> None:
        """Ends the span. status: the HTTP response's; None: there is none, since the client went away."""
        if self._reasons:
            self.span.set_attributes({**self._usage, "gen_ai.response.finish_reasons": self._reasons})
        if request_id is not None:
            self.span.set_attribute("http.response.header.x-request-id", [request_id])
        if status is not None:
            self.span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            self.span.set_attribute("error.type", "client_gone" if status is None else str(status))
            self.span.set_status(trace.StatusCode.ERROR)
        self.span.end()


class OtelSpans(Spans):
    """Spans that `middleware`, which has to be the outermost, begins and ends."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("splash_trt", __version__)
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()
        self._current: ContextVar[Span] = ContextVar("span")
        self._live: set[RequestSpan] = set()
        self._at: tuple[int, str] | None = None
        self.middlewares = (self.middleware,)

    def close(self) -> None:
        """Sends the spans that have not been sent, or gives up after EXPORT_S."""
        self._provider.shutdown()

    def current(self) -> Span:
        return self._current.get(Span())

    def on_status(self, status: Status) -> None:
        before, self._at = self._at, (status.epoch, status.layout)
        if before is None or before == self._at:
            return
        about: dict[str, str | int] = {
            "splash.layout.source": before[1],
            "splash.layout.target": status.layout,
            "splash.epoch": status.epoch,
        }
        for live in self._live:
            live.span.add_event("layout_switch", about)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in UNTRACED:
            return await handler(request)
        live = RequestSpan(self._start(request))
        token = self._current.set(live)
        self._live.add(live)
        status, request_id = None, None
        try:
            response = await handler(request)
            status, request_id = response.status, response.headers.get("X-Request-Id")
            return response
        finally:
            self._live.discard(live)
            self._current.reset(token)
            live.end(status, request_id)

    def _start(self, http: web.Request) -> trace.Span:
        resource = http.match_info.route.resource
        route = resource.canonical if resource else "other"
        operation = OPERATIONS.get(http.path)
        about: dict[str, str] = {"http.request.method": http.method, "http.route": route, "url.path": http.path}
        if operation is not None:
            about |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "splash-trt"}
            about |= {"gen_ai.request.model": self._model_name, "gen_ai.response.model": self._model_name}
        name = f"{http.method} {route}" if operation is None else f"{operation} {self._model_name}"
        carrier = {key.lower(): value for key, value in http.headers.items()}
        parent = self._propagator.extract(carrier)
        return self._tracer.start_span(name, parent, kind=trace.SpanKind.SERVER, attributes=about)
