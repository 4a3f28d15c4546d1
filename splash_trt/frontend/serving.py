"""What routes share: the engine, the tokenizer, the limits, and the first checks of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from splash_trt.frontend.background import BackgroundThreads
from splash_trt.frontend.decoding import decode
from splash_trt.frontend.engine_client import EngineClient
from splash_trt.frontend.errors import ApiError, unavailable
from splash_trt.frontend.grammars import Grammars
from splash_trt.frontend.metrics import Metrics
from splash_trt.frontend.sampling import Defaults
from splash_trt.frontend.structured import Form
from splash_trt.frontend.tokenizer import Tokenizer
from splash_trt.link import Ready

LONG_TEXT = 2000  # characters; longer texts are tokenized off the event loop
RETRY_AFTER_S = 1
ENCODINGS = ("identity", "gzip", "deflate", "br", "zstd")
"""Content-Encodings of bodies; the last two need packages that Python may not have."""

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_queued: int
    """Requests that wait for their first token."""
    max_body_bytes: int
    ready_deadline_s: float


@dataclass(kw_only=True)
class Serving:
    """What serves one model. tokenizer None: prompts and answers are token ids."""

    engine: EngineClient
    metrics: Metrics
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    """None without a tokenizer."""
    model_name: str
    limits: Limits
    defaults: Defaults
    tool_parser: str
    """"deepseek_v3", "glm" or "none"."""
    reasoning_parser: str
    """"think" or "none"."""
    background: BackgroundThreads
    num_streams: int = 0
    """Generations under way."""
    draining: bool = False
    """Whether new work is refused, while what is under way goes on."""

    async def body(self, http: web.Request, kind: type[Body]) -> Body:
        """The request's body. Raises ApiError (4xx) if it is not of this type, too long or in an unknown encoding."""
        most = self.limits.max_body_bytes
        encoding = http.headers.get("Content-Encoding", "").strip().lower() or "identity"
        if encoding not in ENCODINGS:
            message = f"Content-Encoding: {encoding[:40]!r} is not allowed; it must be one of {', '.join(ENCODINGS)}"
            raise ApiError(message, status=415, param="Content-Encoding", code="unsupported_encoding")
        try:
            if (http.content_length or 0) > most:
                raise web.HTTPRequestEntityTooLarge(most, http.content_length or 0)
            data = await http.read()
        except web.HTTPRequestEntityTooLarge:
            raise ApiError(f"body: at most {most} bytes are allowed", status=413, param="body") from None
        except web.RequestPayloadError as error:
            what = " ".join(str(error).split()) if encoding == "identity" else f"not valid {encoding}"
            raise ApiError(f"body: {what}", param="body") from None
        return decode(data, kind)

    def ready(self) -> Ready:
        """What the engine serves. Raises ApiError (503) if no engine has been ready yet."""
        if self.engine.ready is None:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        return self.engine.ready

    def ready_to_generate(self, model: str | None) -> Ready:
        """As `ready`. Raises ApiError also while draining, without an engine, or for another model's name."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        ready = self.ready()
        if not self.engine.alive:
            raise unavailable("the engine is not ready yet", "engine_not_ready")
        self.check_model(model)
        return ready

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"model: {name[:200]!r} is not served here; it must be {self.model_name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def need_tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer. Raises ApiError if there is none. field: the one that needs it."""
        if self.tokenizer is None:
            remedy = (
                'send token ids as "prompt" to /v1/completions, or serve an engine built from a folder with'
                " tokenizer.json"
            )
            message = f"{field}: this server has no tokenizer; {remedy}"
            raise ApiError(message, param=field, code="no_tokenizer")
        return self.tokenizer

    async def encode(self, prompts: list[str | list[int]], limit: int) -> list[tuple[int, ...]]:
        """Token ids of each prompt; either all are texts, or none is. Raises ApiError for texts that are sure to have
        more than `limit` tokens."""
        most = self.limits.max_queued
        if len(prompts) > most:
            message = f"prompt: {len(prompts)} prompts are too many; at most {most} may come at once"
            raise ApiError(message, param="prompt")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [tuple(prompt) for prompt in prompts if not isinstance(prompt, str)]
        tokenizer = self.need_tokenizer("prompt")

        def encode() -> list[tuple[int, ...]]:
            return [tuple(tokenizer.encode(text, limit)) for text in texts]

        return await self.background.run(encode) if sum(map(len, texts)) > LONG_TEXT else encode()

    async def check_form(self, form: Form | None, ready: Ready) -> None:
        """Raises ApiError for a form that no answer can have."""
        if form is not None:
            self.need_tokenizer(form.field)
            assert self.grammars is not None
            await self.grammars.check(form, ready)

    def check_count(self, num_prompts: int, num_choices: int) -> None:
        """Raises ApiError if there are more requests than may wait at once, so that trying later would not help."""
        most = self.limits.max_queued
        if num_prompts * num_choices > most:
            message = f"n: {num_choices} for {num_prompts} prompts are too many; at most {most} answers at once"
            raise ApiError(message, param="n")

    def check_room(self, num_requests: int) -> None:
        """Raises ApiError (429) if there is no room in the queue for so many more requests."""
        waiting, most = self.engine.num_queued, self.limits.max_queued
        if waiting + num_requests > most:
            message = f"{waiting} requests wait already, of {most} that may; try later"
            raise ApiError(message, status=429, code="queue_full", retry_after_s=RETRY_AFTER_S)


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
