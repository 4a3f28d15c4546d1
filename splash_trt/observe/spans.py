"""The interface of request spans. The classes here do nothing; with --otlp-endpoint, those of otel.py, the only module
that needs OpenTelemetry, are used in their place."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from aiohttp.typedefs import Middleware

from splash_trt.link import Status

REMEDY = "pip install 'splash-trt[otel]'"


class Span:
    """One HTTP request's span. This one does nothing."""

    def first_token(self) -> None:
        """To be called when the first token of one of the request's answers came."""

    def answered(self, input_tokens: int, output_tokens: int, reason: str) -> None:
        """To be called when one of the request's answers has ended. reason: why."""


class Spans:
    """The spans of one frontend. These do nothing."""

    middlewares: tuple[Middleware, ...] = ()
    """For the application, around all others."""

    def current(self) -> Span:
        """The span of the HTTP request that is handled in this task."""
        return Span()

    def on_status(self, status: Status) -> None:
        """Takes note of the engine's status; a change of layout becomes an event in the span of each open request."""

    def close(self) -> None:
        """To be called at the end."""


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError if `endpoint` is not an http(s) URL, or if OpenTelemetry is not installed."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        example = "http://localhost:4318"
        raise ValueError(f"otlp_endpoint: {endpoint!r} is not the URL of an OTLP collector, such as {example}")
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ValueError(f"otlp_endpoint: spans need OpenTelemetry, which is not installed here: {REMEDY}")


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to: the endpoint if it has a path, otherwise with OTLP's default path."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
