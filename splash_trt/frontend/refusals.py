"""Makes HTTP responses of errors, including those that occur before a route is found."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

from splash_trt.frontend.errors import ApiError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


def clients_id(http: web.BaseRequest) -> str | None:
    """The client's X-Request-Id; None if there is none, or none that can be sent back."""
    given = http.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


def id_of(http: web.BaseRequest) -> str:
    """The X-Request-Id of the response: the client's, or a new one."""
    return clients_id(http) or uuid.uuid4().hex


def refusal(http: web.BaseRequest, error: ApiError) -> web.Response:
    """The response to an error, in the form of OpenAI's API."""
    headers = {"X-Request-Id": id_of(http)}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(body=error.body(), status=error.status, content_type="application/json", headers=headers)


def refusal_of_aiohttp(http: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """The response to an error of aiohttp itself: no such route or method, or an Expect that is not supported."""
    if error.status == web.HTTPExpectationFailed.status_code:
        message = f"Expect: {http.headers.get('Expect', '')!r} is not allowed; it must be 100-continue"
        return refusal(http, ApiError(message, status=error.status, param="Expect"))
    response = refusal(http, ApiError(f"{http.method} {http.path}: {error.reason}", status=error.status))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
