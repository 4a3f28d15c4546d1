"""The HTTP routes. Each handler decodes, checks, asks the engine and shapes the answer; errors are one middleware."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from splash_trt.frontend import metrics as metrics_module
from splash_trt.frontend import protocol
from splash_trt.frontend.beside import Beside
from splash_trt.frontend.client_socket import Completion
from splash_trt.frontend.engine_client import EngineClient
from splash_trt.frontend.errors import ApiError, unavailable
from splash_trt.frontend.generation import Generation
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.protocol import ChatBody, CompletionBody, GenerationBody, LayoutBody
from splash_trt.frontend.responses import ChatShape, CompletionShape, Shape, event
from splash_trt.frontend.stream import Answer
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.link import Ready
from splash_trt.request import Request

log = logging.getLogger(__name__)

LAYOUT_REPLY_S = 60.0  # a step may be long, and the engine reads between steps
LONG_TEXT = 2000  # characters; more than that is tokenised beside the event loop
RETRY_AFTER_S = 1

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


class Frontend:
    """Serves one model. tokenizer None: prompts are token ids, and answers too."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        max_queued: int,
        max_body_bytes: int,
        ready_deadline_s: float,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._beside = Beside()
        self._max_queued = max_queued
        self._max_body_bytes = max_body_bytes
        self._ready_deadline_s = ready_deadline_s
        self._num_streams = 0
        self.draining = False
        """New work is refused, what is under way goes on."""

    @property
    def busy(self) -> bool:
        """A generation is under way."""
        return self._num_streams > 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._middleware])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/v1/layout", self._get_layout)
        app.router.add_post("/v1/layout", self._set_layout)
        app.router.add_get("/v1/switches", self._switches)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._readiness)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's form, and a count of the responses."""
        try:
            response = await handler(request)
        except ApiError as error:
            response = _error_response(error)
        except web.HTTPException as error:  # of aiohttp's own: no such route or method
            response = _error_response(
                ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status), error
            )
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = _error_response(ApiError("the server failed; its log says why", status=500))
        resource = request.match_info.route.resource
        self._metrics.on_response(resource.canonical if resource else "other", response.status)
        return response

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http, CompletionBody)
        ready = self._check(body)
        prompts = await self._encode(body.prompts(), ready.max_context)
        response_id = f"cmpl-{uuid.uuid4().hex}"
        requests = self._requests(body, response_id, prompts, ready, protocol.DEFAULT_MAX_TOKENS)
        return await self._generate(http, body, requests, self._shape(CompletionShape, body, response_id))

    async def completion(self, data: bytes, request_id: str) -> Completion:
        """For local clients: the body of a completion with one prompt. ApiError says why it is refused."""
        body = protocol.decode(data, CompletionBody)
        ready = self._check(body)
        prompts = await self._encode(body.prompts(), ready.max_context)
        if len(prompts) != 1:
            raise ApiError(f"prompt: {len(prompts)} prompts are not allowed; it must be one", param="prompt")
        requests = self._requests(body, request_id, prompts, ready, protocol.DEFAULT_MAX_TOKENS)
        return Completion(self._generation(body, requests), len(prompts[0]))

    def token_name(self, token: int) -> str:
        """How log-probabilities name it."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_name(token)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http, ChatBody)
        ready = self._check(body)
        messages = body.template_messages()
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise _no_tokenizer("messages")
        prompt = tuple(await self._beside.run(lambda: tokenizer.encode_chat(messages, ready.max_context)))
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        requests = self._requests(body, response_id, [prompt], ready, None)
        return await self._generate(http, body, requests, self._shape(ChatShape, body, response_id))

    async def _body(self, http: web.Request, kind: type[Body]) -> Body:
        try:
            if (http.content_length or 0) > self._max_body_bytes:
                raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, http.content_length or 0)
            data = await http.read()
        except web.HTTPRequestEntityTooLarge:
            message = f"body: at most {self._max_body_bytes} bytes are allowed"
            raise ApiError(message, status=413, param="body") from None
        except web.RequestPayloadError as error:  # compressed, and cannot be decompressed
            raise ApiError(f"body: {' '.join(str(error).split())}", param="body") from None
        return protocol.decode(data, kind)

    def _check(self, body: GenerationBody) -> Ready:
        """What can be refused before the prompt is looked at."""
        ready = self._engine.ready
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if ready is None or not self._engine.alive:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        if body.model is not None and body.model != self._model_name:
            self._refuse_model(body.model)
        protocol.check_neutral(body)
        return ready

    def _refuse_model(self, name: str) -> None:
        message = f"model: {name[:200]!r} is not served here; it must be {self._model_name!r}"
        raise ApiError(message, status=404, param="model", code="model_not_found")

    async def _encode(self, prompts: list[str | list[int]], limit: int) -> list[tuple[int, ...]]:
        """Token ids of each prompt; all are texts, or none is. Texts sure to have more than `limit` are refused."""
        if len(prompts) > self._max_queued:
            message = f"prompt: {len(prompts)} prompts are too many; at most {self._max_queued} may come at once"
            raise ApiError(message, param="prompt")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [tuple(prompt) for prompt in prompts if not isinstance(prompt, str)]
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise _no_tokenizer("prompt")

        def encode() -> list[tuple[int, ...]]:
            return [tuple(tokenizer.encode(text, limit)) for text in texts]

        return await self._beside.run(encode) if sum(map(len, texts)) > LONG_TEXT else encode()

    def _requests(
        self,
        body: GenerationBody,
        response_id: str,
        prompts: list[tuple[int, ...]],
        ready: Ready,
        default_max_tokens: int | None,
    ) -> list[Request]:
        return [
            protocol.to_request(body, f"{response_id}-{index}", prompt, ready, default_max_tokens)
            for index, prompt in enumerate(prompts)
        ]

    def _shape(self, kind: type[Shape], body: GenerationBody, response_id: str) -> Shape:
        tokenizer = self._tokenizer if body.wants_text else None
        return kind(
            response_id,
            self._model_name,
            (lambda token: f"token_id:{token}") if tokenizer is None else tokenizer.token_name,
            None if tokenizer is None else tokenizer.token_bytes,
            logprobs=body.num_logprobs() is not None,
            # Without text they are all there is to tell.
            token_ids=bool(body.return_token_ids) or tokenizer is None,
            usage_chunk=body.wants_usage_chunk,
        )

    async def _generate(
        self, http: web.Request, body: GenerationBody, requests: list[Request], shape: Shape
    ) -> web.StreamResponse:
        if body.stream_options is not None and not body.stream:
            raise ApiError("stream_options: allowed with stream true only", param="stream_options")
        generation = self._generation(body, requests)
        self._num_streams += 1
        try:
            generation.submit()
            return await (self._stream if body.stream else self._whole)(http, generation, shape)
        finally:
            generation.close()
            self._num_streams -= 1

    def _generation(self, body: GenerationBody, requests: list[Request]) -> Generation:
        """To be submitted at once, as there is room for it now."""
        stops = body.stops
        tokenizer = self._tokenizer if body.wants_text else None
        if stops and tokenizer is None:
            raise _no_tokenizer("stop")
        self._check_room(len(requests))

        def answer() -> Answer:
            return Answer(None if tokenizer is None else tokenizer.detokenizer(), stops)

        return Generation(self._engine, self._metrics, requests, answer)

    def _check_room(self, num_requests: int) -> None:
        if self._engine.num_unstarted + num_requests > self._max_queued:
            message = f"{self._engine.num_unstarted} requests wait already, of {self._max_queued} that may; try later"
            raise ApiError(message, status=429, code="queue_full", retry_after_s=RETRY_AFTER_S)

    async def _whole(self, http: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
        async for _ in generation.run():
            pass
        body = shape.whole([answer.take() for answer in generation.answers], generation.counts())
        headers = {"X-Request-Id": shape.id}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(self, http: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
        headers = {"X-Request-Id": shape.id, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
        try:
            await response.prepare(http)
            opening = shape.opening(len(generation.answers))
            if opening:
                await response.write(opening)
            async for grown in generation.run():
                data = b"".join([shape.chunk(index, generation.answers[index].take()) for index in grown])
                if data:
                    await response.write(data)
            await response.write(shape.closing(generation.counts()))
        except ConnectionResetError:
            log.debug("%s: the client went away", shape.id)
        except ApiError as error:
            await _end_with(response, error)
        except Exception:
            log.exception("%s failed", shape.id)
            await _end_with(response, ApiError("the server failed; its log says why", status=500))
        return response

    async def _models(self, http: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._describe_model()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["model"] != self._model_name:
            self._refuse_model(http.match_info["model"])
        return json_response(self._describe_model())

    def _describe_model(self) -> dict[str, object]:
        ready = self._engine.ready
        context = None if ready is None else ready.max_context
        about = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "splash-trt"}
        return {**about, "max_model_len": context}

    async def _get_layout(self, http: web.Request) -> web.Response:
        ready, status = self._engine.ready, self._engine.status
        if ready is None:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        capacity = {
            name: {
                "tokens_per_rank": room.per_rank,
                "tokens_total": room.total,
                "tokens_longest_request": room.request,
            }
            for name, room in ready.capacity.items()
        }
        about = {"layouts": ready.layouts, "num_ranks": ready.num_ranks, "capacity": capacity}
        if status is None:
            return json_response({"layout": None, "mode": None, "status": None, **about})
        return json_response({"layout": status.layout, "mode": status.mode, "status": status, **about})

    async def _set_layout(self, http: web.Request) -> web.Response:
        body = await self._body(http, LayoutBody)
        ready = self._engine.ready
        if ready is None:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        body.check(ready.layouts)
        try:
            reply = await asyncio.wait_for(self._engine.set_layout(body.layout, body.pin), LAYOUT_REPLY_S)
        except asyncio.TimeoutError:
            message = f"the engine did not answer within {LAYOUT_REPLY_S:g} s"
            raise ApiError(message, status=504, code="engine_silent") from None
        if reply.error is not None:
            raise ApiError.of(ValueError(reply.error))
        return json_response({"accepted": True, "layout": body.layout, "pin": body.pin})

    async def _switches(self, http: web.Request) -> web.Response:
        return json_response({"object": "list", "data": self._metrics.switches()})

    async def _health(self, http: web.Request) -> web.Response:
        alive = self._engine.alive
        return json_response({"status": "ok" if alive else "no engine"}, 200 if alive else 503)

    async def _readiness(self, http: web.Request) -> web.Response:
        silent_s, reason = self._engine.silent_s(), None
        if not self._engine.alive:
            reason = "the engine is not ready yet" if self._engine.ready is None else "the engine is gone"
        elif self.draining:
            reason = "the server is shutting down"
        elif silent_s > self._ready_deadline_s:
            reason = f"requests are under way and no step has completed for {silent_s:.0f} s"
        return json_response({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def _metrics_text(self, http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": metrics_module.CONTENT_TYPE})


def _error_response(error: ApiError, from_aiohttp: web.HTTPException | None = None) -> web.Response:
    headers = {"X-Request-Id": uuid.uuid4().hex}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if from_aiohttp is not None and "Allow" in from_aiohttp.headers:
        headers["Allow"] = from_aiohttp.headers["Allow"]
    return web.Response(body=error.body(), status=error.status, content_type="application/json", headers=headers)


async def _end_with(response: web.StreamResponse, error: ApiError) -> None:
    """The status line is long gone: the error becomes the stream's last event."""
    try:
        await response.write(event(error.body()))
    except ConnectionResetError:
        pass  # nobody is left to tell


def _no_tokenizer(field: str) -> ApiError:
    remedy = 'send token ids as "prompt" to /v1/completions, or serve an engine built from a folder with tokenizer.json'
    return ApiError(f"{field}: this server has no tokenizer; {remedy}", param=field, code="no_tokenizer")
