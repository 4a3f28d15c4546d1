"""The HTTP application: puts the routes together, and adds errors, API keys and a count of responses to all of them."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from splash_trt.frontend.client_socket import Completion
from splash_trt.frontend.dashboard import routes as dashboard
from splash_trt.frontend.dashboard.history import History
from splash_trt.frontend.errors import ApiError
from splash_trt.frontend.generation_routes import GenerationRoutes
from splash_trt.frontend.openapi import OpenApiRoutes
from splash_trt.frontend.operator_routes import OperatorRoutes
from splash_trt.frontend.refusals import id_of, refusal, refusal_of_aiohttp
from splash_trt.frontend.serving import Serving
from splash_trt.frontend.text_routes import TextRoutes
from splash_trt.observe.log import event

log = logging.getLogger(__name__)

OPEN_PATHS = ("/healthz", "/health", "/readyz", "/version", "/openapi.json")
"""Paths that need no key: load balancers ask for them, and they say nothing about anybody's requests."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Frontend:
    """Serves one model. api_key None: no key is needed. key_for_metrics: /metrics needs the key too."""

    def __init__(
        self, serving: Serving, history: History, *, api_key: str | None = None, key_for_metrics: bool = False
    ) -> None:
        self._serving = serving
        self._history = history
        self._key_digest = None if api_key is None else _digest(api_key.encode())
        self._open_paths = {*OPEN_PATHS, dashboard.ROOT, *dashboard.PATHS, *(() if key_for_metrics else ("/metrics",))}
        self._generation = GenerationRoutes(serving)

    @property
    def busy(self) -> bool:
        """Whether a generation is under way."""
        return self._serving.num_streams > 0

    def drain(self) -> None:
        """Refuse new work; what is under way goes on."""
        self._serving.draining = True

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._serving.limits.max_body_bytes, middlewares=[self._middleware])
        for routes in (
            self._generation,
            TextRoutes(self._serving),
            OperatorRoutes(self._serving),
            dashboard.DashboardRoutes(self._history),
            OpenApiRoutes(has_key=self._key_digest is not None, open_paths=self._open_paths),
        ):
            routes.add_to(app.router)
        return app

    def completion(self, data: bytes, request_id: str) -> Awaitable[Completion]:
        """The completion that a local client asks for. data: a body of /v1/completions with one prompt. Raises ApiError
        if it is refused."""
        return self._generation.local_completion(data, request_id)

    def token_name(self, token: int) -> str:
        """The token's name in log-probabilities."""
        tokenizer = self._serving.tokenizer
        return f"token_id:{token}" if tokenizer is None else tokenizer.token_name(token)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's form, and a count of the responses."""
        try:
            self._check_key(request)
            response = await handler(request)
        except ApiError as error:
            # Neither the error's message nor its field are logged, as they may quote what the client sent.
            about = {"status": error.status, "code": error.code}
            event(log, logging.DEBUG, "refused", method=request.method, path=request.path[:100], **about)
            response = refusal(request, error)
        except web.HTTPException as error:  # of aiohttp's own: no such route or method
            response = refusal_of_aiohttp(request, error)
        except RecursionError:  # JSON that could just be parsed may still be too deep for a template or a grammar
            response = refusal(request, ApiError("body: the JSON is nested too deeply", param="body"))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = refusal(request, ApiError("the server failed; its log says why", status=500))
        if not response.prepared and "X-Request-Id" not in response.headers:
            response.headers["X-Request-Id"] = id_of(request)
        resource = request.match_info.route.resource
        self._serving.metrics.on_response(resource.canonical if resource else "other", response.status)
        return response

    def _check_key(self, request: web.Request) -> None:
        if self._key_digest is None or request.path in self._open_paths:
            return
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        # Digests have one length, so that the time of the comparison tells nothing about the key.
        given = _digest(key.strip().encode(errors="surrogateescape"))
        if not hmac.compare_digest(given, self._key_digest) or kind.lower() != "bearer":
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(message, status=401, code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
