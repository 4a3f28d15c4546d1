"""Routes for operators: models, the layout and the reasons for it, switches, health, metrics, version."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from splash_trt.frontend import metrics as metrics_module
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.protocol import LayoutBody
from splash_trt.frontend.serving import Serving, json_response
from splash_trt.link import Status
from splash_trt.version import __version__
from splash_trt.wording import rounded

LAYOUT_REPLY_S = 60.0  # the engine answers between steps, which may be long
EXPLAIN_REPLY_S = 8.0  # less than clients wait, such as `splash-trt top`
JSON = "application/json"
YES, NO = ("1", "true"), ("0", "false")

Reply = TypeVar("Reply")


class Model(msgspec.Struct, frozen=True):
    """max_model_len: longest prompt + output; null before the engine has said it."""

    id: str
    max_model_len: int | None
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "splash-trt"


class Models(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Capacity(msgspec.Struct, frozen=True):
    """Cache tokens that a layout holds; the longest request may have tokens_longest_request."""

    tokens_per_rank: tuple[int, ...]
    tokens_total: int
    tokens_longest_request: int


class LayoutAnswer(msgspec.Struct, frozen=True):
    layout: str | None
    mode: str | None
    """"auto" or "pinned"."""
    status: Status | None
    layouts: tuple[str, ...]
    """Those that this deployment may use."""
    num_ranks: int
    capacity: dict[str, Capacity]
    explain: dict[str, Any] | None | msgspec.UnsetType = msgspec.UNSET
    """What the policy saw, compared and decided; with ?explain=1. null: the engine did not say so in time."""
    explain_error: str | msgspec.UnsetType = msgspec.UNSET
    """Why `explain` is null."""


class LayoutAccepted(msgspec.Struct, frozen=True):
    """From now on GET tells of the switch, which begins after the step under way, and of its end."""

    layout: str
    pin: bool
    accepted: Literal[True] = True


class Switches(msgspec.Struct, frozen=True):
    """The latest first."""

    data: list[dict[str, Any]]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True):
    status: str


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reason: str | None


class Version(msgspec.Struct, frozen=True):
    version: str


class OperatorRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_get("/v1/layout", self._get_layout)
        router.add_post("/v1/layout", self._set_layout)
        router.add_get("/v1/switches", self._switches)
        for path in ("/healthz", "/health"):  # vLLM's clients ask for the second
            router.add_get(path, self._health)
        router.add_get("/readyz", self._readiness)
        router.add_get("/metrics", self._metrics_text)
        router.add_get("/version", self._version)

    async def _models(self, http: web.Request) -> web.Response:
        return json_response(Models([self._describe_model()]))

    async def _model(self, http: web.Request) -> web.Response:
        self._serving.check_model(http.match_info["model"])
        return json_response(self._describe_model())

    def _describe_model(self) -> Model:
        ready = self._serving.engine.ready
        return Model(self._serving.model_name, None if ready is None else ready.max_context)

    async def _get_layout(self, http: web.Request) -> web.Response:
        engine = self._serving.engine
        explains = _flag(http, "explain")
        ready, status = self._serving.ready(), engine.status
        explain: dict[str, Any] | None | msgspec.UnsetType = msgspec.UNSET
        explain_error: str | msgspec.UnsetType = msgspec.UNSET
        if explains:
            try:
                explain = rounded((await asyncio.wait_for(engine.explain(), EXPLAIN_REPLY_S)).report)
            except asyncio.TimeoutError:  # steps may be long under load; the other fields are known all the same
                explain, explain_error = None, _silent(EXPLAIN_REPLY_S)
        return json_response(
            LayoutAnswer(
                layout=None if status is None else status.layout,
                mode=None if status is None else status.mode,
                status=status,
                layouts=ready.layouts,
                num_ranks=ready.num_ranks,
                capacity={
                    name: Capacity(room.per_rank, room.total, room.request) for name, room in ready.capacity.items()
                },
                explain=explain,
                explain_error=explain_error,
            )
        )

    async def _set_layout(self, http: web.Request) -> web.Response:
        _need_json(http)
        body = await self._serving.body(http, LayoutBody)
        body.check(self._serving.ready().layouts)
        reply = await _within(LAYOUT_REPLY_S, self._serving.engine.set_layout(body.layout, body.pin))
        if reply.error is not None:
            raise ApiError.of(ValueError(reply.error))
        return json_response(LayoutAccepted(body.layout, body.pin))

    async def _switches(self, http: web.Request) -> web.Response:
        return json_response(Switches(rounded(self._serving.metrics.switches())))

    async def _health(self, http: web.Request) -> web.Response:
        alive = self._serving.engine.alive
        return json_response(Health("ok" if alive else "no engine"), 200 if alive else 503)

    async def _readiness(self, http: web.Request) -> web.Response:
        engine = self._serving.engine
        silent_s, reason = engine.silent_s(), None
        if not engine.alive:
            reason = "the engine is not ready yet" if engine.ready is None else "the engine is gone"
        elif self._serving.draining:
            reason = "the server is shutting down"
        elif silent_s > self._serving.limits.ready_deadline_s:
            reason = f"requests are under way and no step has completed for {silent_s:.0f} s"
        return json_response(Readiness(reason is None, reason), 200 if reason is None else 503)

    async def _metrics_text(self, http: web.Request) -> web.Response:
        # Off the event loop, since there may be thousands of lines after switches of many kinds.
        text = await self._serving.background.run(self._serving.metrics.text)
        return web.Response(body=text, headers={"Content-Type": metrics_module.CONTENT_TYPE})

    async def _version(self, http: web.Request) -> web.Response:
        return json_response(Version(__version__))


def _need_json(http: web.Request) -> None:
    """Raises ApiError (415) unless Content-Type is JSON: a browser lets any website send others here unasked."""
    if http.content_type != JSON:
        message = f"Content-Type: {http.content_type[:100]!r} is not allowed here; it must be {JSON}"
        raise ApiError(message, status=415, param="Content-Type", code="unsupported_media_type")


def _flag(http: web.Request, name: str) -> bool:
    values = http.query.getall(name, [NO[0]])
    if len(values) != 1 or values[0] not in (*YES, *NO):
        raise ApiError(f"{name}: {','.join(values)[:40]!r} is not allowed; it must be 1 or 0", param=name)
    return values[0] in YES


async def _within(seconds: float, reply: Coroutine[Any, Any, Reply]) -> Reply:
    try:
        return await asyncio.wait_for(reply, seconds)
    except asyncio.TimeoutError:
        raise ApiError(_silent(seconds), status=504, code="engine_silent") from None


def _silent(seconds: float) -> str:
    return f"the engine did not answer within {seconds:g} s"
