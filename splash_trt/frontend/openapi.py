"""GET /openapi.json: the API as an OpenAPI 3.1 document, made from the types that bodies are read and written with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from splash_trt.frontend.chat import ChatBody
from splash_trt.frontend.dashboard.history import Timeline
from splash_trt.frontend.errors import ErrorBody
from splash_trt.frontend.operator_routes import (
    Health,
    LayoutAccepted,
    LayoutAnswer,
    Model,
    Models,
    Readiness,
    Switches,
    Version,
)
from splash_trt.frontend.protocol import CompletionBody, LayoutBody
from splash_trt.frontend.responses import Chat, ChatChunk, Completion
from splash_trt.frontend.serving import json_response
from splash_trt.frontend.text_routes import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from splash_trt.version import __version__

REF = "#/components/schemas/{name}"
KEY = "apiKey"

ASKING = (400, 404, 413, 415, 503)
"""Statuses with which any body can be refused."""
GENERATING = (*ASKING, 429, 500)
REASONS = {
    400: "A field is wrong: the error's param names it",
    401: "The API key is missing or wrong",
    404: "No such model",
    413: "The body is too long",
    415: "The Content-Type is not application/json where it must be, or the Content-Encoding is unknown",
    429: "Too many requests wait already; Retry-After says when to try again",
    500: "The engine failed",
    503: "The engine is not ready, or the server is shutting down",
    504: "The engine did not answer in time",
}


@dataclass(frozen=True)
class Route:
    """One route. answer: the type of its JSON answer, or else a content type. stream: the type of a stream's events."""

    method: str
    path: str
    summary: str
    answer: Any
    body: Any = None
    stream: Any = None
    errors: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    unready: Any = None
    """The type of a 503's body if that is not an error's."""


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_AFTER = _query("after", {"type": "integer", "minimum": 0, "maximum": 10**12 - 1}, "What has come since that second")
_EXPLAIN = _query("explain", {"enum": ["0", "1", "true", "false"]}, "Also say why the layout is what it is")

ROUTES = (
    Route("post", "/v1/completions", "Continue prompts", Completion, CompletionBody, Completion, GENERATING),
    Route("post", "/v1/chat/completions", "Answer a chat", Chat, ChatBody, ChatChunk, GENERATING),
    Route("get", "/v1/models", "The model that is served", Models),
    Route("get", "/v1/models/{model}", "One model", Model, errors=(404,), parameters=(_MODEL,)),
    Route("post", "/tokenize", "Token ids of a text or a chat", Tokenized, TokenizeBody, errors=ASKING),
    Route("post", "/detokenize", "The text of token ids", Detokenized, DetokenizeBody, errors=ASKING),
    Route(
        "get", "/v1/layout", "The attention layout and what each would hold", LayoutAnswer,
        errors=(400, 500, 503), parameters=(_EXPLAIN,),
    ),
    Route(
        "post", "/v1/layout", "Go to a layout, or let it follow the load", LayoutAccepted, LayoutBody,
        errors=(*ASKING, 500, 504),
    ),
    Route("get", "/v1/switches", "The latest switches between layouts", Switches),
    Route("get", "/v1/timeline", "The last half hour by seconds", Timeline, errors=(400,), parameters=(_AFTER,)),
    Route("get", "/dashboard", "A page that shows the layout, the load and the switches", "text/html"),
    Route("get", "/healthz", "Whether the engine is there", Health, unready=Health),
    Route("get", "/health", "The same, as vLLM names it", Health, unready=Health),
    Route("get", "/readyz", "Whether requests are served and steps complete", Readiness, unready=Readiness),
    Route("get", "/metrics", "For Prometheus", "text/plain"),
    Route("get", "/version", "The server's version", Version),
)  # fmt: skip


class OpenApiRoutes:
    """has_key: the server has an API key, which all paths but open_paths need."""

    def __init__(self, *, has_key: bool, open_paths: Iterable[str]) -> None:
        self._document = document(open_paths if has_key else None)

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/openapi.json", self._get)

    async def _get(self, http: web.Request) -> web.Response:
        return json_response(self._document)


def document(open_paths: Iterable[str] | None) -> dict[str, Any]:
    """The OpenAPI document. open_paths: those that need no key; None: no path needs one."""
    kinds: dict[type, None] = {ErrorBody: None}
    for route in ROUTES:
        for kind in (route.answer, route.body, route.stream, route.unready):
            kinds.update({kind: None} if isinstance(kind, type) else {})
    _, schemas = msgspec.json.schema_components(list(kinds), ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    open_to_all = None if open_paths is None else set(open_paths)
    for route in ROUTES:
        has_key = open_to_all is not None and route.path not in open_to_all
        paths.setdefault(route.path, {})[route.method] = _operation(route, has_key)
    components: dict[str, Any] = {"schemas": schemas}
    if open_to_all is not None:
        components["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    info = {"title": "Splash-TRT", "version": __version__, "license": {"name": "Apache-2.0"}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, has_key: bool) -> dict[str, Any]:
    answers = {"200": _answer(route)}
    for status in sorted({*route.errors, *((401,) if has_key else ())}):
        answers[str(status)] = {"description": REASONS[status], "content": _json(ErrorBody)}
    if route.unready is not None:
        answers["503"] = {"description": "Not so", "content": _json(route.unready)}
    operation: dict[str, Any] = {"summary": route.summary, "responses": answers}
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(route.body)}
    if has_key:
        operation["security"] = [{KEY: []}]
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if isinstance(route.answer, str):
        return {"description": route.summary, "content": {route.answer: {"schema": {"type": "string"}}}}
    content = _json(route.answer)
    if route.stream is not None:
        # OpenAPI 3.1 cannot describe the events of a stream.
        about = "Server-sent events: the data of each is the object of x-event-schema, and the last one's is [DONE]"
        content["text/event-stream"] = {"schema": {"description": about}, "x-event-schema": _ref(route.stream)}
    return {"description": route.summary, "content": content}


def _json(kind: Any) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(kind)}}


def _ref(kind: Any) -> dict[str, Any]:
    return {"$ref": REF.format(name=kind.__name__)}
