"""Errors in the form that OpenAI's API gives them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import msgspec

from splash_trt.wording import shortened

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

MAX_MESSAGE = 300
"""The most characters of a message, as it may quote what the client sent."""
_MAX_END = 90


class ErrorDetail(msgspec.Struct, frozen=True):
    """param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """What a client is told. `param` names the field at fault; `retry_after_s` becomes a Retry-After header."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """The middle of a long message is cut out, unless the server is at fault."""
        if status < 500:
            message = shortened(message, most=MAX_MESSAGE, end=_MAX_END)
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param and param[: MAX_MESSAGE - _MAX_END]
        self.code = code
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: ValueError) -> ApiError:
        """From a ValueError of the form "field: what is wrong", as the project's are."""
        message = str(error)
        field, colon, _ = message.partition(":")
        return cls(message, param=field if colon and field.isidentifier() else None)

    def body(self) -> bytes:
        """The response's body, JSON."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, self.code)))


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot take requests now; it may be able to soon."""
    return ApiError(message, status=503, code=code, retry_after_s=1)


def engine_ended() -> ApiError:
    """The error of requests that were under way when the engine ended."""
    return ApiError("the engine ended", status=500, code="engine_ended")
