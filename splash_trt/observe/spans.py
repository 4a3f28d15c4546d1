"""Spans of requests as the rest of the frontend sees them: what is told here goes nowhere unless a deployment asks for
it with --otlp-endpoint, and then to otel.py, which alone needs OpenTelemetry."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from aiohttp.typedefs import Middleware

from splash_trt.link import Status

REMEDY = "pip install 'splash-trt[otel]'"


class Span:
    """One HTTP request's. This one tells nobody."""

    def first_token(self) -> None:
        """The first token of one of its answers came."""

    def answered(self, input_tokens: int, output_tokens: int, reason: str) -> None:
        """One of its answers has ended, and how."""


class Spans:
    """The spans of one frontend. These tell nobody."""

    middlewares: tuple[Middleware, ...] = ()
    """For the application, around all others."""

    def current(self) -> Span:
        """Of the HTTP request that is handled in this task."""
        return Span()

    def on_status(self, status: Status) -> None:
        """How things stand; a change of the layout is an event of every request under way."""

    def close(self) -> None:
        """Nothing more will be told."""


def check_endpoint(endpoint: str) -> None:
    """ValueError for what is no http(s) URL, or if OpenTelemetry is not installed."""
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
    """Where spans go: the endpoint if it has a path, else OTLP's usual one."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
